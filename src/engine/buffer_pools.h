#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <vector>

#include "engine/unit.h"
#include "memory/slot_pool.h"

namespace fsdp::engine {

/// The allocators of new blocks, where memory is not the engine's own: of blocks for gathers, which all ranks request alike, and of others.
struct BufferSources {
  comm::MemorySource of_gathers;
  comm::MemorySource of_the_rest;
};

/// The slots of an engine's buffers. They share one pool, except where gathers go into symmetric memory, or into memory of a source of
/// their own: then these have a pool of their own. Ranks find each other's symmetric blocks, and NCCL registers windows, by using the same
/// ones in the same order. All ranks gather alike, but the moments at which a rank needs memory for gradients depend on the gradients that
/// it gets.
class BufferPools {
 public:
  BufferPools(c10::Device device, memory::Accounting& accounting, memory::SlotPool::Idle idle)
      : device_(device), shared_(device, accounting, idle), of_gathers_(device, accounting, idle) {}

  memory::SlotPool& of_gathers() { return gathers_apart_ ? of_gathers_ : shared_; }
  memory::SlotPool& of_the_rest() { return shared_; }

  /// Takes new blocks from this kind of memory, if the process groups of the units have it. The first group that has it serves all units,
  /// because units share their slots. Each communicator also takes the memory that its collectives themselves need from its own group.
  /// Collective.
  void set_memory(const std::vector<std::unique_ptr<Unit>>& units, comm::BufferMemory memory);

  void set_sources(BufferSources sources);

  /// See SlotPool.
  void end_step();

 private:
  c10::Device device_;
  memory::SlotPool shared_;
  memory::SlotPool of_gathers_;
  bool gathers_apart_ = false;
};

}  // namespace fsdp::engine
