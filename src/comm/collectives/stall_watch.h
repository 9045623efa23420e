#pragma once

#include <chrono>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace fsdp::comm {

class Group;

/// A guard around the wait for one message of a group. It ends the wait if the message can't arrive any more. When a connection closes,
/// Gloo ends the waits for its messages, except the wait for a message that was half sent or half received, which would last until the
/// time-out. Waits for other ranks do not end either. Therefore one thread, which all waits of the process share, checks a few times a
/// second whether the message can still arrive. It also reports long waits (WaitNotice).
class StallWatch {
 public:
  /// `work` outlives this. It is aborted (wait() returns false) once group.is_hopeless(peer).
  StallWatch(Group& group, c10d::Work& work, int peer);
  ~StallWatch();
  StallWatch(const StallWatch&) = delete;
  StallWatch& operator=(const StallWatch&) = delete;

 private:
  class Thread;
  static Thread& thread();

  Group& group_;
  c10d::Work& work_;
  const int peer_;
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  bool seen_ = false;  // Used by the thread only, as the next.
  bool told_ = false;
};

}  // namespace fsdp::comm
