#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

namespace fsdp::comm {

/// Point-to-point messages in flight over one c10d backend. Post all receives before the sends: a message that finds its receiver ready
/// needs no second handshake.
class Transfers {
 public:
  explicit Transfers(c10::intrusive_ptr<c10d::Backend> backend) : backend_(std::move(backend)), argument_(1) {}

  void reserve(std::size_t receives, std::size_t sends);
  void receive(at::Tensor buffer, int peer, int tag);
  void send(at::Tensor buffer, int peer, int tag);

  /// Waits until the first `count` receives are complete. Throws std::runtime_error with c10d's text and the peer.
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

  static void wait(const Message& message, const char* direction);

  c10::intrusive_ptr<c10d::Backend> backend_;
  std::vector<at::Tensor> argument_;  // c10d takes vectors; one serves for all messages.
  std::vector<Message> receives_;
  std::vector<Message> sends_;
  std::size_t received_ = 0;
  std::size_t sent_ = 0;
};

}  // namespace fsdp::comm
