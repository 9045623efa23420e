#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <vector>

#include "engine/unit.h"
#include "memory/slot_pool.h"

namespace fsdp::engine {

/// The source of such memory: the first process group of the units' that has it serves all of them, as they share their slots. Empty if
/// none has, or for kProcess. Each communicator also takes what its collectives need themselves from its own group's memory, if that has
/// it.
memory::SlotPool::Source group_memory(const std::vector<std::unique_ptr<Unit>>& units, c10::Device device, comm::BufferMemory memory);

}  // namespace fsdp::engine
