#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace fsdp::comm {

class HostMemory;

/// A collective under way, which any thread of this process can advance as far as is possible without waiting. (Ranks wait for their
/// collectives in different orders, compute meanwhile, or wait for something else. If each rank did its part of a collective only when it
/// waits for that collective, they could wait for each other for ever.)
class AdvancingCollective {
 public:
  virtual ~AdvancingCollective() = default;
  /// Does all work that is possible without waiting. It is called under the lock that all advancing collectives share.
  virtual void advance() = 0;

 protected:
  void begin_advancing();
  /// Calls `state` under the lock that all advancing collectives share.
  static void change(const std::function<void()>& state);
  /// When this returns, no thread is in advance(), and none will call it. Idempotent.
  void end_advancing();
};

/// Makes a thread of this process, and one of each peer, advance the collectives under way. Returns at once. For collectives that overlap
/// with the program.
void advance_all_beside(HostMemory& host_memory);

/// Advances all collectives that this process has under way as far as possible, and wakes the threads of this process that wait for them.
void advance_all_and_wake(HostMemory& host_memory);

/// Advances all collectives that this process has under way, until `ready()` is true, which is called under the same lock. Now and then it
/// calls `look`. If the wait cannot succeed, `look` returns the reason, and this throws std::runtime_error with that text. After some time
/// it asks the peers to advance their collectives, because the threads of a peer's process may be computing, or waiting for something else.
void advance_all_until(HostMemory& host_memory, const std::function<bool()>& ready,
                       const std::function<std::optional<std::string>()>& look);

/// Notifies the thread that advances collectives at the request of peers that the set of peers has changed.
void peers_changed();

}  // namespace fsdp::comm
