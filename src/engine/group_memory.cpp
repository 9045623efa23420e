#include "engine/group_memory.h"

namespace fsdp::engine {

memory::SlotPool::Source group_memory(const std::vector<std::unique_ptr<Unit>>& units, c10::Device device, comm::BufferMemory memory) {
  std::shared_ptr<comm::Communicator> source;
  for (const auto& unit : units) {
    const auto& [gather, reduce, outer, post_forward] = unit->communicators;
    for (const auto& communicator : {gather, reduce, outer, post_forward}) {
      if (communicator == nullptr || !communicator->use_memory(device, memory)) continue;
      if (memory != comm::BufferMemory::kProcess && source == nullptr) source = communicator;
    }
  }
  if (source == nullptr) return {};
  return [source, device](std::int64_t bytes) { return source->allocate(device, bytes); };
}

}  // namespace fsdp::engine
