#pragma once

#include <cstdint>

namespace fsdp {

/// What is kept in host memory instead of on the mesh's device. The memory is pinned if that device is not the CPU.
enum class Offload : std::uint8_t {
  kNone,
  /// Optimizer state alone. For each update it is copied to the device and back, one unit's share at a time. Updates run on the device.
  kOptimizerState,
  /// Main parameters, main gradients and optimizer state. Updates run on the CPU. Parameters are copied to the device before each
  /// all-gather, and gradients to the host after each reduction. The device holds only what computation and communication need at the time.
  /// (FSDP2's CPUOffloadPolicy.)
  kAll,
};

}  // namespace fsdp
