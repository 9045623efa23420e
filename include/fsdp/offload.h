#pragma once

#include <cstdint>

namespace fsdp {

/// What lies in host memory (pinned, where the mesh's device is not the CPU) instead of on the mesh's device.
enum class Offload : std::uint8_t {
  kNone,
  /// Optimizer state alone. It is copied to the device for each update and back, a unit's share at a time; updates run on the device.
  kOptimizerState,
  /// Main parameters, main gradients and optimizer state; updates run on the CPU. Parameters are copied to the device before each
  /// all-gather, gradients to the host after each reduction; the device holds only what computation and communication need at the time.
  /// (FSDP2's CPUOffloadPolicy.)
  kAll,
};

}  // namespace fsdp
