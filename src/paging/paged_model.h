#pragma once

#include <atomic>
#include <functional>

#include "engine/engine.h"
#include "paging/gate.h"

namespace fsdp::paging {

/// The state of paging for a whole sharded model. The storages of its units share it.
struct PagedModel {
  static PagedModel& of(const engine::Engine& engine);

  Gate gate;
  /// Called before the first touch, and before the first touch after each backward or change of settings. Throws if the module is no longer
  /// the one that was sharded, or a memory budget can no longer be kept. May be empty.
  std::function<void()> validate;
  std::atomic<bool> validated = false;
  /// Called once, when the first backward has ended. May be empty.
  std::function<void()> after_first_backward;
  std::atomic<bool> adds_to_gradients = false;  ///< A backward has begun that adds to gradients of an earlier one.
  std::atomic<bool> warned_of_grad = false;
  std::atomic<bool> checked_unused = false;
};

}  // namespace fsdp::paging
