#pragma once

#include <atomic>
#include <functional>

#include "engine/engine.h"
#include "paging/gate.h"

namespace fsdp::paging {

/// What paging knows of a sharded model as a whole. Shared by the storages of its units.
struct PagedModel {
  static PagedModel& of(const engine::Engine& engine);

  Gate gate;
  /// Called before the first touch, and before the first one after each backward: throws if the module is not what was sharded. May be
  /// empty.
  std::function<void()> validate;
  std::atomic<bool> validated = false;
  std::atomic<bool> warned_of_grad = false;
  std::atomic<bool> checked_unused = false;
};

}  // namespace fsdp::paging
