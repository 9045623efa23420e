#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

namespace fsdp::comm {

class Group;

/// Stands around the wait for one message of a group, and ends it where the message can't arrive any more. When a connection closes, Gloo
/// tells those who wait for it, but not for the one message that was half sent or half received: that wait would last until the time-out.
/// Nor does it tell those who wait for another rank. So one thread, which all waits of the process share, looks a few times a second
/// whether there is still hope.
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
  bool seen_ = false;  // The thread's own.
};

}  // namespace fsdp::comm
