#pragma once

#include <atomic>
#include <mutex>

namespace fsdp::paging {

/// A lock between threads that use one model at the same time. Operators may run concurrently, but units are gathered and freed only while
/// no operator runs. If there is only one thread, an operator costs two atomic additions.
class Gate {
 public:
  /// Call it when an operator begins. Waits for a thread that is in alone().
  void enter() {
    while (true) {
      running_.fetch_add(1);
      if (!closed_.load()) return;
      leave();
      const std::lock_guard until_open(mutex_);
    }
  }
  /// Call it when the operator has ended.
  void leave() {
    if (running_.fetch_sub(1) == 1 && closed_.load()) running_.notify_all();
  }

  /// Calls `body` while no operator runs.
  template <typename Body>
  void alone(const Body& body) {
    const Closed closed(*this);
    body();
  }
  /// Does the same as alone() followed by enter(), but no other thread can enter in between.
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
  std::mutex mutex_;  // held by the thread that is in alone()
};

}  // namespace fsdp::paging
