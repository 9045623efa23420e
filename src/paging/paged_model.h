#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

#include "engine/engine.h"
#include "paging/gate.h"

namespace fsdp::paging {

/// What paging knows of a sharded model as a whole. Shared by the storages of its units.
struct PagedModel {
  static PagedModel& of(const engine::Engine& engine);

  /// By the order in which models were sharded, which is that of all ranks.
  const std::uint64_t number = next_number();
  Gate gate;
  /// Called before the first touch, and before the first one after each backward: throws if the module is not what was sharded. May be
  /// empty.
  std::function<void()> validate;
  std::atomic<bool> validated = false;
  std::atomic<bool> warned_of_grad = false;
  std::atomic<bool> checked_unused = false;

 private:
  static std::uint64_t next_number() {
    static std::atomic<std::uint64_t> last = 0;
    return ++last;
  }
};

}  // namespace fsdp::paging
