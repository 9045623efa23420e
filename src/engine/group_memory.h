#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <vector>

#include "engine/unit.h"
#include "memory/slot_pool.h"

namespace fsdp::engine {

/// The allocator of the process group that gathers the first unit for which there is one; empty if there is none, or with `enable` false.
/// All communicators of the units take what they need themselves from theirs, or no more.
memory::SlotPool::Source group_memory(const std::vector<std::unique_ptr<Unit>>& units, c10::Device device, bool enable);

}  // namespace fsdp::engine
