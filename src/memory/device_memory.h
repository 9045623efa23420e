#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <cstdint>

namespace fsdp::memory {

// A plan's device is meta: its memory has sizes and no bytes. All functions below return such memory for it.

/// Returns memory for the engine's own buffers; not initialised. It comes from torch's allocator, except for large blocks on the CPU, which
/// are mapped one by one, with huge pages if the system offers them. In malloc's heap they would lie between activations and temporaries,
/// live longer than these, and prevent the heap from shrinking. Huge pages make the first access, and every collective, cheaper. Throws
/// c10::OutOfMemoryError.
c10::DataPtr allocate(c10::Device device, std::int64_t bytes);

/// Returns memory for data that are sent to other ranks. If this process has a SharedHeap, the memory comes from there, so that peers of
/// this host can read it.
c10::DataPtr allocate_shareable(c10::Device device, std::int64_t bytes);

/// Does the same as allocate, and also reports the allocation to torch's memory profiler, as torch's own allocators do.
c10::DataPtr allocate_as_torch(c10::Device device, std::int64_t bytes);

/// Returns such memory as a 1-D tensor of `bytes` bytes, set to zero.
at::Tensor zeros(c10::Device device, std::int64_t bytes);

/// Blocks until the device has completed the work of its current stream. Does nothing on the CPU.
void synchronize(c10::Device device);

enum class HostMemoryKind : std::uint8_t {
  kPinned,    ///< Page-locked memory, from which devices copy without help of the CPU. A mesh of CPUs needs none, and gets ordinary memory.
  kPageable,  ///< Ordinary memory, which may be swapped out. All memory of the host can be used.
};

/// Returns the device on which tensors in host memory lie: the CPU, or meta for a plan's device.
inline c10::Device host_of(c10::Device device) { return device.is_meta() ? device : c10::Device(c10::kCPU); }

/// Returns host memory for data that `device` copies; not initialised.
c10::DataPtr allocate_host(c10::Device device, std::int64_t bytes, HostMemoryKind kind = HostMemoryKind::kPinned);

/// Returns such memory as a 1-D tensor of `bytes` bytes, set to zero.
at::Tensor host_zeros(c10::Device device, std::int64_t bytes, HostMemoryKind kind = HostMemoryKind::kPinned);

}  // namespace fsdp::memory
