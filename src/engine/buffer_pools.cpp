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
  gathers_apart_ = source && memory == comm::BufferMemory::kSymmetric;
  shared_.set_source(gathers_apart_ ? comm::MemorySource() : source);
  of_gathers_.set_source(gathers_apart_ ? source : comm::MemorySource());
}

void BufferPools::set_sources(BufferSources sources) {
  gathers_apart_ = true;
  of_gathers_.set_source(std::move(sources.of_gathers));
  shared_.set_source(std::move(sources.of_the_rest));
}

void BufferPools::end_step() {
  shared_.end_step();
  of_gathers_.end_step();
}

}  // namespace fsdp::engine
