#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <cstdint>

namespace fsdp::memory {

/// Memory for the engine's own buffers; not initialised. From torch's allocator, except for large blocks on the CPU: those are mapped one
/// by one, with huge pages where the system offers them. In malloc's heap they would lie between activations and temporaries, live longer
/// than these, and so keep the heap from shrinking; and huge pages make the first touch, and every collective, cheaper. Throws
/// c10::OutOfMemoryError.
c10::DataPtr allocate(c10::Device device, std::int64_t bytes);

/// The same for what is sent to other ranks: from this process's SharedHeap where it has one, so that peers of this host can read it.
c10::DataPtr allocate_shareable(c10::Device device, std::int64_t bytes);

/// As allocate, for memory that is a tensor's in all but this: torch's memory profiler hears of it, as of what torch's allocators give.
c10::DataPtr allocate_as_torch(c10::Device device, std::int64_t bytes);

/// As allocate, a 1-D tensor of `bytes` bytes, set to zero.
at::Tensor zeros(c10::Device device, std::int64_t bytes);

/// Blocks until the device has done what its current stream holds. Nothing to do on the CPU.
void synchronize(c10::Device device);

enum class HostMemory : std::uint8_t {
  kPinned,    ///< Devices copy from it without help of the CPU. There is none for a mesh of CPUs, which has no need of it.
  kPageable,  ///< Any: it may be swapped out, and may be all that the host has.
};

/// Memory of the host for what `device` copies; not initialised.
c10::DataPtr allocate_host(c10::Device device, std::int64_t bytes, HostMemory kind = HostMemory::kPinned);

/// The same as a 1-D tensor of `bytes` bytes, set to zero.
at::Tensor host_zeros(c10::Device device, std::int64_t bytes, HostMemory kind = HostMemory::kPinned);

}  // namespace fsdp::memory
