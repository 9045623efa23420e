#pragma once

namespace fsdp::engine {

/// The calls of Engine::attend for one unit [Attendance is agreed]. `optional`, `divides_by_present` and `by_all` are the same on all
/// ranks.
struct Attendance {
  bool optional = false;            ///< attend has been called. Before all ranks attend a forward, no prediction gathers the unit.
  bool divides_by_present = false;  ///< Sums of gradients are divided by the number of ranks that have attended.
  bool by_all = false;              ///< All ranks have attended a forward whose backward may still follow.
  bool skips = false;               ///< The last call on this rank had present = false.
  bool gives = false;               ///< This rank has attended since gradients were last reduced, so it counts in the next reduction.

  /// The backward that may have followed a forward has ended.
  void forget_forwards() { by_all = skips = false; }
};

}  // namespace fsdp::engine
