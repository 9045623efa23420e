#include "turns.h"

#include <utility>

namespace sim {

void Turn::wait_until_over() {
  std::unique_lock lock(mutex_);
  over_.wait(lock, [this] { return is_over_; });
}

void Turn::wait() {
  wait_until_over();
  if (failure_) std::rethrow_exception(failure_);
}

std::exception_ptr Turn::take(std::exception_ptr failure) {
  if (!failure) {
    try {
      work_();
    } catch (...) {
      failure = std::current_exception();
    }
  }
  const std::lock_guard lock(mutex_);
  failure_ = failure;
  is_over_ = true;
  over_.notify_all();
  return failure;
}

Turns::Turns() : thread_([this] { run(); }) {}

Turns::~Turns() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

std::shared_ptr<Turns> Turns::of_process() {
  static const auto made = std::make_shared<Turns>();
  return made;
}

std::shared_ptr<Turn> Turns::queue(std::function<void()> work) {
  auto turn = std::make_shared<Turn>(std::move(work));
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back(turn);
  }
  changed_.notify_all();
  return turn;
}

/// What is queued is done before the end.
void Turns::run() {
  std::exception_ptr failure;
  while (true) {
    std::shared_ptr<Turn> turn;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return ends_ || !queue_.empty(); });
      if (queue_.empty()) return;
      turn = std::move(queue_.front());
      queue_.pop_front();
    }
    failure = turn->take(failure);
  }
}

}  // namespace sim
