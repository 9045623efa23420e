#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <cstdint>

namespace fsdp::memory {

/// Page-locked memory of the host that lives long, of whole pages, set to zero. Torch's allocator of such memory rounds up to powers of two
/// (before 2.13 without a choice), and keeps what it has once given. For CUDA devices, by the runtime that torch has loaded; null where
/// there is none, or where it refuses: take torch's memory then.
/// Freeing it waits for all that its device does, which may still copy from it.
c10::DataPtr allocate_pinned(c10::Device device, std::int64_t bytes);

}  // namespace fsdp::memory
