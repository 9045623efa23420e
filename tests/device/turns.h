#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace sim {

/// One that has been queued.
class Turn {
 public:
  explicit Turn(std::function<void()> work) : work_(std::move(work)) {}
  /// Until it is over. wait() throws what it, or one before it, threw.
  void wait();
  void wait_until_over();
  /// Does the work, unless one before it has failed. Its failure.
  std::exception_ptr take(std::exception_ptr failure);

 private:
  std::mutex mutex_;
  std::condition_variable over_;
  std::function<void()> work_;
  bool is_over_ = false;
  std::exception_ptr failure_;
};

/// A thread that does one thing after the other, until one fails: then all fail.
class Turns {
 public:
  Turns();
  ~Turns();
  static std::shared_ptr<Turns> of_process();

  std::shared_ptr<Turn> queue(std::function<void()> work);

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Turn>> queue_;
  bool ends_ = false;
  std::thread thread_;  // last: it uses the others
};

}  // namespace sim
