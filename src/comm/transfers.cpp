#include "comm/transfers.h"

#include <stdexcept>

#include "base/exception_text.h"

namespace fsdp::comm {

void Transfers::reserve(std::size_t receives, std::size_t sends) {
  receives_.reserve(receives);
  sends_.reserve(sends);
}

void Transfers::receive(at::Tensor buffer, int peer, int tag) {
  argument_[0] = std::move(buffer);
  receives_.push_back({backend_->recv(argument_, peer, tag), peer});
}

void Transfers::send(at::Tensor buffer, int peer, int tag) {
  argument_[0] = std::move(buffer);
  sends_.push_back({backend_->send(argument_, peer, tag), peer});
}

void Transfers::wait_receives(std::size_t count) {
  for (; received_ < count; ++received_) wait(receives_[received_], "receiving from");
}

void Transfers::wait_sends() {
  for (; sent_ < sends_.size(); ++sent_) wait(sends_[sent_], "sending to");
}

void Transfers::forget() noexcept {
  receives_.clear();
  sends_.clear();
}

void Transfers::wait(const Message& message, const char* direction) {
  std::string text;
  try {
    if (message.work->wait()) return;
    text = "aborted";
  } catch (...) {
    text = current_exception_text();
  }
  throw std::runtime_error(text + " (" + direction + " rank " + std::to_string(message.peer) + ")");
}

}  // namespace fsdp::comm
