#pragma once

#include <ATen/core/Tensor.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "comm/collectives/group.h"

namespace fsdp::comm {

/// Point-to-point messages in flight over a group's control backend, which outlives this. Post all receives before the sends: a message
/// that finds its receiver ready needs no second handshake. Throws std::runtime_error with c10d's text and the peer.
class Transfers {
 public:
  explicit Transfers(Group& group) : group_(group), argument_(1) {}

  void reserve(std::size_t receives, std::size_t sends);
  void receive(at::Tensor buffer, int peer, int tag);
  void send(at::Tensor buffer, int peer, int tag);

  /// Waits until the first `count` receives are complete.
  void wait_receives(std::size_t count);
  void wait_receives() { wait_receives(receives_.size()); }
  void wait_sends();

  /// Lets go of all messages, complete or not: Gloo touches no buffer of a forgotten message again.
  void forget() noexcept;

 private:
  struct Message {
    c10::intrusive_ptr<c10d::Work> work;
    int peer;
  };

  Group& group_;
  std::vector<at::Tensor> argument_;  // c10d takes vectors; one serves for all messages.
  std::vector<Message> receives_;
  std::vector<Message> sends_;
  std::size_t received_ = 0;
  std::size_t sent_ = 0;
};

}  // namespace fsdp::comm
