#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

namespace fsdp::comm {

class Group;

/// A guard around the wait for one message of a group. It ends the wait if the message can't arrive any more. When a connection closes,
/// Gloo ends the waits for its messages, except the wait for a message that was half sent or half received, which would last until the
/// time-out. Waits for other ranks do not end either. Therefore one thread, which all waits of the process share, checks a few times a
/// second whether the message can still arrive.
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
  bool seen_ = false;  // Used by the thread only.
};

}  // namespace fsdp::comm
