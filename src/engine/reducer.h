#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "engine/unit.h"
#include "memory/slot_pool.h"

namespace fsdp::engine {

/// The life of gradients: collected per unit as autograd delivers them, reduced when backward departs from the unit, summed in rank order
/// into the main gradients. Called by Engine only, under its lock.
class Reducer {
 public:
  Reducer(memory::SlotPool& pool, memory::Accounting& accounting) : pool_(pool), accounting_(accounting) {}

  /// A gradient of this rank for one parameter, of any strides: copied (the first in this buffer) or added.
  void collect(Unit& unit, std::size_t parameter, const at::Tensor& gradient);

  /// Backward moves to `destination`: starts the reduction of every collecting unit that is not related to it [Reduce on departure]. The
  /// moment depends on the order of touches only, which is collective, not on which gradients this rank happened to get.
  void depart_to(const Unit& destination);

  /// The end of backward: ranks tell each other which parameters had gradients; what is still to be reduced on any rank is reduced on all;
  /// everything is waited for.
  void finish(std::span<const std::unique_ptr<Unit>> units);

  /// Frees the main gradients.
  void zero_grad(Unit& unit);

  /// Drops unreduced gradients after a failure; waits for what is under way, so that no peer writes into reused memory.
  void drop(std::span<const std::unique_ptr<Unit>> units);

 private:
  void acquire(Unit& unit);
  void allocate_main_gradient(Unit& unit);
  void reduce(Unit& unit);
  void finish_oldest();
  void gather_replicas();
  void release(Unit& unit);

  memory::SlotPool& pool_;
  memory::Accounting& accounting_;
  std::vector<Unit*> collecting_;
  std::deque<Unit*> reducing_;    // in the order of their start
  std::vector<Unit*> to_gather_;  // reduced into a region of replicated main gradients
};

}  // namespace fsdp::engine
