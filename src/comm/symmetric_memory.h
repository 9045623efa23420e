#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <cstdint>
#include <string>

/// torch's symmetric memory (torch.distributed._symmetric_memory): buffers that ranks allocate alike, so that the peers' can be found.
/// Which backend serves it is torch's setting of the process. Thread-safe; torch's allocators are not, so that while one thread finds its
/// peers no other may allocate.
namespace fsdp::comm::symmetric_memory {

/// This build of torch has such memory for the device.
bool exists(c10::Device device);

/// Not initialised. Memory that is given back serves the next request that it fits, when the device has done with it. It is never freed:
/// NCCL would keep what it has registered. Throws torch's errors.
c10::DataPtr allocate(c10::Device device, std::int64_t bytes);

/// If the tensor's storage is memory that allocate() gave, the ranks of the group find each other's: collective over them; blocks the first
/// time. Else does nothing and returns false. `group`: as torch.distributed names it.
bool find_peers(const at::Tensor& tensor, const std::string& group);

}  // namespace fsdp::comm::symmetric_memory
