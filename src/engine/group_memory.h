#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <vector>

#include "engine/unit.h"
#include "memory/slot_pool.h"

namespace fsdp::engine {

/// With `enable`, the allocator of the first process group of the units' that has one: it serves all of them, as they share their slots.
/// Empty if no group has one, or without `enable`. Each communicator also takes what its collectives need themselves from its own group's
/// allocator, or, without `enable`, no more.
memory::SlotPool::Source group_memory(const std::vector<std::unique_ptr<Unit>>& units, c10::Device device, bool enable);

}  // namespace fsdp::engine
