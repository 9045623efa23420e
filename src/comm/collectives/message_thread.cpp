#include "comm/collectives/message_thread.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

namespace fsdp::comm {

namespace {

constexpr std::chrono::milliseconds kBetweenLooks{200};

}  // namespace

MessageThread::MessageThread(std::function<void()> look) : queue_(std::make_shared<Queue>()) {
  queue_->look = std::move(look);
  std::thread(&MessageThread::run, queue_).detach();
}

MessageThread::~MessageThread() {
  if (getpid() != process_) return;
  std::unique_lock<std::mutex> lock(queue_->mutex);
  queue_->ended = true;
  queue_->changed.notify_all();
  queue_->changed.wait(lock, [&] { return !queue_->looks; });
}

void MessageThread::add(const void* key, std::function<void()> wait) {
  const std::lock_guard<std::mutex> lock(queue_->mutex);
  queue_->waiting.push_back({.key = key, .wait = std::move(wait)});
  queue_->changed.notify_all();
}

void MessageThread::remove(const void* key) {
  if (getpid() != process_) return;
  std::unique_lock<std::mutex> lock(queue_->mutex);
  auto& waiting = queue_->waiting;
  const auto has_key = [&](const Waiting& one) { return one.key == key; };
  if (waiting.size() > 1) waiting.erase(std::remove_if(waiting.begin() + 1, waiting.end(), has_key), waiting.end());
  queue_->changed.wait(lock, [&] { return waiting.empty() || !has_key(waiting.front()); });
}

void MessageThread::wait_for(const void* key) {
  if (getpid() != process_) return;
  std::unique_lock<std::mutex> lock(queue_->mutex);
  queue_->changed.wait(lock, [&] { return std::ranges::find(queue_->waiting, key, &Waiting::key) == queue_->waiting.end(); });
}

void MessageThread::wait_for_all_but(std::size_t newest) {
  if (getpid() != process_) return;
  std::unique_lock<std::mutex> lock(queue_->mutex);
  queue_->changed.wait(lock, [&] { return queue_->waiting.size() <= newest; });
}

void MessageThread::run(const std::shared_ptr<Queue>& queue) {
  std::unique_lock<std::mutex> lock(queue->mutex);
  const auto has_work = [&] { return queue->ended || !queue->waiting.empty(); };
  for (;;) {
    while (queue->look && !queue->changed.wait_for(lock, kBetweenLooks, has_work)) {
      queue->looks = true;
      lock.unlock();
      queue->look();
      lock.lock();
      queue->looks = false;
      queue->changed.notify_all();
    }
    queue->changed.wait(lock, has_work);
    if (queue->waiting.empty()) return;
    const auto wait = std::move(queue->waiting.front().wait);
    lock.unlock();
    wait();
    lock.lock();
    queue->waiting.pop_front();
    queue->changed.notify_all();
  }
}

}  // namespace fsdp::comm
