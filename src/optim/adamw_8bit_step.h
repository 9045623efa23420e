#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "optim/fused.h"

namespace fsdp::optim {

/// A piece of a parameter that is cut between blocks, dense: fp32, bf16 or fp16. On the CPU, or on a device for which steps_adamw_8bit_on()
/// returns true.
struct QuantizedPiece {
  at::Tensor value;
  at::Tensor gradient;
  /// For each of the two moments: codes (uint8, one per element), and the largest magnitude of each block (fp32).
  std::vector<at::Tensor> state;
};

/// The CPU has a loop for it; devices need a kernel of ours.
bool steps_adamw_8bit_on(c10::DeviceType type);

/// One step of AdamW (AdamStep's weight decay is decoupled, without amsgrad and maximize) on a state of 8 bits. `steps`: updates, this one
/// included.
void step_adamw_8bit(const QuantizedPiece& piece, const AdamStep& step, std::int64_t steps);

}  // namespace fsdp::optim
