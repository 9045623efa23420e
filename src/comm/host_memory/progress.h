#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace fsdp::comm {

class HostMemory;

/// A collective under way, for which any thread of this process may do what can be done by now. (Ranks wait for their collectives in
/// different orders, compute meanwhile, or wait for something else. If each did its part of a collective only when it waits for that one,
/// they could wait for each other for ever.)
class AdvancingCollective {
 public:
  virtual ~AdvancingCollective() = default;
  /// Does what needs no waiting. Under the lock that all advancing collectives share.
  virtual void advance() = 0;

 protected:
  void begin_advancing();
  /// Calls it under the lock that all advancing collectives share.
  static void change(const std::function<void()>& state);
  /// Afterwards no thread is in advance(), and none comes. Idempotent.
  void end_advancing();
};

/// Does what can be done by now of all that this process has under way, and wakes those of its threads that wait for that.
void advance_all_and_wake(HostMemory& host_memory);

/// Advances all that this process has under way, until `ready()`, which is asked under the same lock. Asks `look` now and then, which says
/// why there is no hope, where there is none. After some time it asks the peers to advance theirs: the own threads of a peer's process may
/// compute, or wait for something else. Throws std::runtime_error with look's text.
void advance_all_until(HostMemory& host_memory, const std::function<bool()>& ready,
                       const std::function<std::optional<std::string>()>& look);

/// Peers were added or have gone: the thread that advances collectives when a peer asks for it then listens to others.
void peers_changed();

}  // namespace fsdp::comm
