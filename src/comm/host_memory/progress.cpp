#include "comm/host_memory/progress.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include "base/process.h"
#include "comm/host_memory/host_memory.h"

namespace fsdp::comm {
namespace {

using std::chrono::duration_cast;
using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr int kSpins = 200;  // about 20 microseconds, so that waiting for a peer that is nearly ready takes no system call
constexpr microseconds kPatience{200};
constexpr milliseconds kBetweenRequests{5};
constexpr milliseconds kBetweenLooks{20};
constexpr microseconds kIdle = std::chrono::seconds(1);

using Word = std::atomic<std::uint32_t> HeapHead::*;

/// Words of all peers, and the heaps that hold them.
class Words {
 public:
  Words(HostMemory* host_memory, Word word) {
    if (host_memory != nullptr) peers_ = host_memory->peers();
    for (const auto& peer : peers_) words_.push_back({.word = &(peer->head().*word), .seen = 0});
  }
  void add(const std::atomic<std::uint32_t>& word) { words_.insert(words_.begin(), {.word = &word, .seen = 0}); }
  void read() {
    for (auto& word : words_) word.seen = word.word->load(std::memory_order_acquire);
  }
  bool changed() const {
    return std::any_of(words_.begin(), words_.end(),
                       [](const WatchedWord& word) { return word.word->load(std::memory_order_acquire) != word.seen; });
  }
  void sleep(microseconds time) const { sleep_on(words_, time.count()); }

 private:
  std::vector<std::shared_ptr<const PeerHeap>> peers_;
  std::vector<WatchedWord> words_;
};

/// The collectives of this process that are under way, and the thread that advances them when a peer asks for it.
class AdvancingCollectives {
 public:
  static AdvancingCollectives& current() { return of_this_process<AdvancingCollectives>(); }

  void add(AdvancingCollective& collective) {
    const std::lock_guard<std::mutex> lock(mutex_);
    under_way_.push_back(&collective);
    if (!started_) std::thread(&AdvancingCollectives::listen, this).detach();
    started_ = true;
    if (under_way_.size() == 1 && !can_sleep_on_several()) bump();
  }

  void remove(AdvancingCollective& collective) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::erase(under_way_, &collective);
  }

  void bump() {
    changed_.fetch_add(1, std::memory_order_release);
    wake_sleepers(changed_);
  }

  void change(const std::function<void()>& state) {
    const std::lock_guard<std::mutex> lock(mutex_);
    state();
  }

  bool advance_all(const std::function<bool()>& ready) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (AdvancingCollective* collective : under_way_) collective->advance();
    return ready();
  }

 private:
  bool idle() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return under_way_.empty();
  }

  [[noreturn]] void listen() {
    for (;;) {
      // Without a way to wait for several words, the peers' are looked at often, but only while something is under way.
      Words words(can_sleep_on_several() || !idle() ? HostMemory::opened().get() : nullptr, &HeapHead::requests);
      words.add(changed_);
      words.read();
      advance_all([] { return true; });
      words.sleep(kIdle);
    }
  }

  std::mutex mutex_;
  std::vector<AdvancingCollective*> under_way_;  // in the order in which they have begun
  bool started_ = false;
  std::atomic<std::uint32_t> changed_{0};
};

}  // namespace

void AdvancingCollective::begin_advancing() { AdvancingCollectives::current().add(*this); }

void AdvancingCollective::change(const std::function<void()>& state) { AdvancingCollectives::current().change(state); }

void AdvancingCollective::end_advancing() { AdvancingCollectives::current().remove(*this); }

void peers_changed() { AdvancingCollectives::current().bump(); }

void advance_all_beside(HostMemory& host_memory) {
  host_memory.ask_peers_to_advance();
  AdvancingCollectives::current().bump();
}

void advance_all_and_wake(HostMemory& host_memory) {
  AdvancingCollectives::current().advance_all([] { return true; });
  host_memory.wake_peers();
}

void advance_all_until(HostMemory& host_memory, const std::function<bool()>& ready,
                       const std::function<std::optional<std::string>()>& look) {
  AdvancingCollectives& collectives = AdvancingCollectives::current();
  if (collectives.advance_all(ready)) return;
  Words news(&host_memory, &HeapHead::news);
  news.add(host_memory.head().news);  // Another thread of this process may have advanced them.
  for (int spin = 0; spin < kSpins; ++spin) {
    news.read();
    if (collectives.advance_all(ready)) return;
    for (int pause = 0; pause < 20 && !news.changed(); ++pause) std::atomic_signal_fence(std::memory_order_seq_cst);
  }
  auto now = steady_clock::now();
  auto next_request = now + kPatience;
  auto next_look = now + kBetweenLooks;
  for (;;) {
    news.read();
    if (collectives.advance_all(ready)) return;
    now = steady_clock::now();
    if (now >= next_request) {
      host_memory.ask_peers_to_advance();
      next_request = now + kBetweenRequests;
    }
    if (now >= next_look) {
      const auto hopeless = look();
      // Data that a peer published before it left still count.
      if (hopeless && collectives.advance_all(ready)) return;
      if (hopeless) throw std::runtime_error(*hopeless);
      next_look = now + kBetweenLooks;
    }
    news.sleep(duration_cast<microseconds>(std::min(next_request, next_look) - now));
  }
}

}  // namespace fsdp::comm
