#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "comm/communicator.h"

/// torch's symmetric memory (torch.distributed._symmetric_memory): buffers that ranks allocate alike, so that the peers' can be found. A
/// setting of torch decides which backend provides it in this process. Thread-safe. Torch's allocators are not, so no thread may ask for
/// memory while another one finds its peers.
namespace fsdp::comm::symmetric_memory {

/// True if this build of torch has such memory for the device.
bool exists(c10::Device device);

/// Returns a source of such memory. A block that is given back serves the next request of the same source that it fits, once the device no
/// longer uses it. Ranks that make the same requests therefore get blocks that belong together. Blocks are never freed, because NCCL would
/// keep its registration of them. The source throws torch's errors.
MemorySource source(c10::Device device);

/// If a source gave the memory of the tensor's storage, the ranks of the group exchange the addresses of their blocks. It is then
/// collective over them, and blocks the first time. Otherwise it does nothing and returns false. `group` is torch.distributed's name of the
/// group.
bool find_peers(const at::Tensor& tensor, const std::string& group);

}  // namespace fsdp::comm::symmetric_memory
