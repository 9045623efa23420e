#include "comm/collectives/transfers.h"

#include <stdexcept>
#include <string>

#include "base/exception_text.h"

namespace fsdp::comm {

void Transfers::reserve(std::size_t receives, std::size_t sends) {
  receives_.reserve(receives);
  sends_.reserve(sends);
}

void Transfers::receive(at::Tensor buffer, int peer, int tag) {
  argument_[0] = std::move(buffer);
  try {
    receives_.push_back({group_.control->recv(argument_, peer, tag), peer});
  } catch (...) {
    throw std::runtime_error(current_exception_text() + " (receiving from rank " + std::to_string(group_.row.global_rank(peer)) + ")");
  }
}

void Transfers::send(at::Tensor buffer, int peer, int tag) {
  argument_[0] = std::move(buffer);
  try {
    sends_.push_back({group_.control->send(argument_, peer, tag), peer});
  } catch (...) {
    throw std::runtime_error(current_exception_text() + " (sending to rank " + std::to_string(group_.row.global_rank(peer)) + ")");
  }
}

void Transfers::wait_receives(std::size_t count) {
  for (; received_ < count; ++received_) group_.wait(*receives_[received_].work, receives_[received_].peer, "receiving from");
}

void Transfers::wait_sends() {
  for (; sent_ < sends_.size(); ++sent_) group_.wait(*sends_[sent_].work, sends_[sent_].peer, "sending to");
}

void Transfers::forget() noexcept {
  receives_.clear();
  sends_.clear();
}

}  // namespace fsdp::comm
