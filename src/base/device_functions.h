#pragma once

#include <c10/core/DeviceType.h>

#include <array>
#include <atomic>
#include <cstddef>

namespace fsdp {

/// The launcher of a kernel of this library, by type of device; null where torch's operators are used. Launchers for CUDA register
/// themselves in builds with a compiler for CUDA; tests register one for the simulated device. Any thread.
template <typename Function>
class DeviceFunctions {
 public:
  Function* of(c10::DeviceType type) const { return functions_[index(type)].load(std::memory_order_acquire); }
  /// Returns the previous one.
  Function* set(c10::DeviceType type, Function* function) { return functions_[index(type)].exchange(function, std::memory_order_acq_rel); }

 private:
  static std::size_t index(c10::DeviceType type) { return static_cast<std::size_t>(type); }

  std::array<std::atomic<Function*>, static_cast<std::size_t>(c10::COMPILE_TIME_MAX_DEVICE_TYPES)> functions_{};
};

}  // namespace fsdp
