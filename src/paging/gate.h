#pragma once

#include <atomic>
#include <mutex>

namespace fsdp::paging {

/// Where threads that use one model at the same time meet: operators run beside each other, but units come and go only while none runs.
/// Costs an operator of the only thread two atomic additions.
class Gate {
 public:
  /// An operator begins. Waits for whoever is alone.
  void enter() {
    while (true) {
      running_.fetch_add(1);
      if (!closed_.load()) return;
      leave();
      const std::lock_guard until_open(mutex_);
    }
  }
  /// It has ended.
  void leave() {
    if (running_.fetch_sub(1) == 1 && closed_.load()) running_.notify_all();
  }

  /// Calls `body` while no operator runs.
  template <typename Body>
  void alone(const Body& body) {
    const Closed closed(*this);
    body();
  }
  /// As alone() and then enter(), with no other thread in between.
  template <typename Body>
  void enter_after(const Body& body) {
    const Closed closed(*this);
    body();
    running_.fetch_add(1);
  }

 private:
  class Closed {
   public:
    explicit Closed(Gate& gate) : gate_(gate), lock_(gate.mutex_) {
      gate_.closed_.store(true);
      for (int running = gate_.running_.load(); running != 0; running = gate_.running_.load()) gate_.running_.wait(running);
    }
    ~Closed() { gate_.closed_.store(false); }
    Closed(const Closed&) = delete;
    Closed& operator=(const Closed&) = delete;

   private:
    Gate& gate_;
    std::lock_guard<std::mutex> lock_;
  };

  std::atomic<int> running_ = 0;
  std::atomic<bool> closed_ = false;
  std::mutex mutex_;  // held by who is alone
};

}  // namespace fsdp::paging
