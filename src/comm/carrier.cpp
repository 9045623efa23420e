#include "comm/carrier.h"

#include <algorithm>
#include <thread>
#include <utility>

namespace fsdp::comm {

Carrier::Carrier() : queue_(std::make_shared<Queue>()) { std::thread(&Carrier::run, queue_).detach(); }

Carrier::~Carrier() {
  if (getpid() != process_) return;
  const std::lock_guard<std::mutex> lock(queue_->mutex);
  queue_->ended = true;
  queue_->changed.notify_all();
}

void Carrier::add(const void* key, std::function<void()> wait) {
  const std::lock_guard<std::mutex> lock(queue_->mutex);
  queue_->waiting.push_back({.key = key, .wait = std::move(wait)});
  queue_->changed.notify_all();
}

void Carrier::remove(const void* key) {
  if (getpid() != process_) return;
  std::unique_lock<std::mutex> lock(queue_->mutex);
  auto& waiting = queue_->waiting;
  const auto has_key = [&](const Waiting& one) { return one.key == key; };
  if (waiting.size() > 1) waiting.erase(std::remove_if(waiting.begin() + 1, waiting.end(), has_key), waiting.end());
  queue_->changed.wait(lock, [&] { return waiting.empty() || !has_key(waiting.front()); });
}

void Carrier::run(const std::shared_ptr<Queue>& queue) {
  std::unique_lock<std::mutex> lock(queue->mutex);
  for (;;) {
    queue->changed.wait(lock, [&] { return queue->ended || !queue->waiting.empty(); });
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
