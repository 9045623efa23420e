#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "comm/call.h"

namespace fsdp::testing {

/// Whether headers that have come are handed on.
struct HeaderGate {
  std::atomic<bool> is_open = true;
  std::atomic<std::uint64_t> first_held = 0;  ///< Those of earlier collectives are handed on in any case.
  std::atomic<std::uint64_t> newest = 0;      ///< Whose header has been asked for.
  std::atomic<bool> is_overdue = false;       ///< Somebody has waited for a long time: the gate is open then.
};

/// Passes messages on to another backend. The headers of other ranks wait at the gate.
class HeldHeaders final : public c10d::Backend {
 public:
  HeldHeaders(c10::intrusive_ptr<c10d::Backend> inner, std::shared_ptr<HeaderGate> gate)
      : Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)), gate_(std::move(gate)) {}

  const std::string getBackendName() const override { return "held"; }
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int peer, int tag) override {
    return inner_->send(tensors, peer, tag);
  }
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int peer, int tag) override {
    auto work = inner_->recv(tensors, peer, tag);
    const auto number = static_cast<std::uint64_t>(tag);
    if (tag != comm::tags::header(number)) return work;
    gate_->newest = number;
    return c10::make_intrusive<Held>(std::move(work), gate_, number);
  }

 private:
  class Held final : public c10d::Work {
   public:
    Held(c10::intrusive_ptr<c10d::Work> inner, std::shared_ptr<HeaderGate> gate, std::uint64_t number)
        : inner_(std::move(inner)), gate_(std::move(gate)), number_(number) {}
    bool wait(std::chrono::milliseconds timeout) override {
      const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(10);
      while (!gate_->is_open && number_ >= gate_->first_held && !is_aborted_) {
        if (std::chrono::steady_clock::now() > until) gate_->is_open = gate_->is_overdue = true;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      return inner_->wait(timeout);
    }
    void abort() override {
      is_aborted_ = true;
      inner_->abort();
    }

   private:
    const c10::intrusive_ptr<c10d::Work> inner_;
    const std::shared_ptr<HeaderGate> gate_;
    const std::uint64_t number_;
    std::atomic<bool> is_aborted_ = false;
  };

  const c10::intrusive_ptr<c10d::Backend> inner_;
  const std::shared_ptr<HeaderGate> gate_;
};

}  // namespace fsdp::testing
