#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "comm/communicator.h"

/// torch's symmetric memory (torch.distributed._symmetric_memory): buffers that ranks allocate alike, so that the peers' can be found.
/// Which backend serves it is torch's setting of the process. Thread-safe; torch's allocators are not, so that while one thread finds its
/// peers no other may ask for memory.
namespace fsdp::comm::symmetric_memory {

/// This build of torch has such memory for the device.
bool exists(c10::Device device);

/// Gives such memory. What is given back serves the source's next request that it fits, when the device has done with it, and no other
/// source's: ranks that ask alike get blocks that belong together. It is never freed, as NCCL would keep what it has registered. The source
/// throws torch's errors.
MemorySource source(c10::Device device);

/// If the tensor's storage is memory that a source gave, the ranks of the group find each other's: collective over them; blocks the first
/// time. Else does nothing and returns false. `group`: as torch.distributed names it.
bool find_peers(const at::Tensor& tensor, const std::string& group);

}  // namespace fsdp::comm::symmetric_memory
