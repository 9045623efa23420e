#include "engine/buffer_pools.h"

#include <utility>

namespace fsdp::engine {

void BufferPools::set_memory(const std::vector<std::unique_ptr<Unit>>& units, comm::BufferMemory memory) {
  comm::MemorySource source;
  for (const auto& unit : units) {
    const auto& [gather, reduce, outer, post_forward] = unit->communicators;
    for (const auto& communicator : {gather, reduce, outer, post_forward}) {
      if (communicator == nullptr) continue;
      auto own = communicator->use_memory(device_, memory);
      if (own && !source) source = std::move(own);
    }
  }
  is_symmetric_ = source && memory == comm::BufferMemory::kSymmetric;
  shared_.set_source(is_symmetric_ ? comm::MemorySource() : source);
  symmetric_.set_source(is_symmetric_ ? source : comm::MemorySource());
}

void BufferPools::free_idle() {
  shared_.free_idle();
  symmetric_.free_idle();
}

void BufferPools::end_step() {
  shared_.end_step();
  symmetric_.end_step();
}

}  // namespace fsdp::engine
