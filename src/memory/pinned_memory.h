#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <cstdint>

namespace fsdp::memory {

/// Returns page-locked host memory for long use, of whole pages, set to zero. Torch's allocator of such memory rounds up to powers of two
/// (before 2.13 always), and never returns memory to the system. This function works for CUDA devices, by the runtime that torch has
/// loaded. It returns null if there is no runtime, or if the runtime refuses; use torch's memory then. Freeing the memory waits for all
/// work of its device, which may still copy from it.
c10::DataPtr allocate_pinned(c10::Device device, std::int64_t bytes);

}  // namespace fsdp::memory
