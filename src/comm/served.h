#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace fsdp::comm {

class Neighbourhood;

/// A collective under way, for which any thread of this process may do what can be done by now. (Ranks wait for their collectives in
/// different orders, compute meanwhile, or wait for something else. If each did its part of a collective only when it waits for that one,
/// they could wait for each other for ever.)
class Served {
 public:
  virtual ~Served() = default;
  /// Does what needs no waiting. Under the lock of all that is served.
  virtual void advance() = 0;

 protected:
  void start_service();
  /// Calls it under the lock of all that is served.
  static void change(const std::function<void()>& state);
  /// Afterwards no thread is in advance(), and none comes. Idempotent.
  void end_service();
};

/// Does what can be done by now of all that this process has under way, and wakes those of its threads that wait for that.
void serve_and_wake(Neighbourhood& neighbourhood);

/// Serves all that this process has under way, until `ready()`, which is asked under the same lock. Asks `look` now and then, which says
/// why there is no hope, where there is none. After some time the peers' threads that serve are called: those of a process whose own
/// threads compute, or wait for something else. Throws std::runtime_error with look's text.
void serve_until(Neighbourhood& neighbourhood, const std::function<bool()>& ready, const std::function<std::optional<std::string>()>& look);

/// Peers were added or have gone: the thread that serves when it is called looks at what it listens to.
void neighbours_changed();

}  // namespace fsdp::comm
