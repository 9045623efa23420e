#include "comm/served.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include "comm/neighbourhood.h"

namespace fsdp::comm {
namespace {

using std::chrono::duration_cast;
using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr int kSpins = 200;  // some 20 microseconds: a peer that is about as far is awaited without a system call
constexpr microseconds kPatience{200};
constexpr milliseconds kBetweenCalls{5};
constexpr milliseconds kBetweenLooks{20};
constexpr microseconds kIdle = std::chrono::seconds(1);

using Word = std::atomic<std::uint32_t> HeapHead::*;

/// Words of all peers, and the heaps that hold them.
class Words {
 public:
  Words(Neighbourhood* neighbourhood, Word word) {
    if (neighbourhood != nullptr) peers_ = neighbourhood->peers();
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

/// All that is served, and the thread that serves when a peer calls.
class Service {
 public:
  // Never destroyed: its thread lives as long as the process. A forked process begins with one of its own.
  static Service& current() {
    static const int registered = pthread_atfork(nullptr, nullptr, [] { service_ = new Service(); });
    if (registered != 0) throw std::runtime_error("pthread_atfork failed");
    return *service_;
  }

  void add(Served& served) {
    const std::lock_guard<std::mutex> lock(mutex_);
    served_.push_back(&served);
    if (!started_) std::thread(&Service::listen, this).detach();
    started_ = true;
    if (served_.size() == 1 && !can_sleep_on_several()) bump();
  }

  void remove(Served& served) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::erase(served_, &served);
  }

  void bump() {
    changed_.fetch_add(1, std::memory_order_release);
    wake_sleepers(changed_);
  }

  void change(const std::function<void()>& state) {
    const std::lock_guard<std::mutex> lock(mutex_);
    state();
  }

  bool serve(const std::function<bool()>& ready) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (Served* served : served_) served->advance();
    return ready();
  }

 private:
  bool idle() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return served_.empty();
  }

  [[noreturn]] void listen() {
    for (;;) {
      // Without a way to wait for several words, the peers' are looked at often, but only while something is under way.
      Words words(can_sleep_on_several() || !idle() ? Neighbourhood::opened().get() : nullptr, &HeapHead::call);
      words.add(changed_);
      words.read();
      serve([] { return true; });
      words.sleep(kIdle);
    }
  }

  static Service* service_;

  std::mutex mutex_;
  std::vector<Served*> served_;  // in the order in which they have begun
  bool started_ = false;
  std::atomic<std::uint32_t> changed_{0};
};

Service* Service::service_ = new Service();

}  // namespace

void Served::start_service() { Service::current().add(*this); }

void Served::change(const std::function<void()>& state) { Service::current().change(state); }

void Served::end_service() { Service::current().remove(*this); }

void neighbours_changed() { Service::current().bump(); }

void serve_and_wake(Neighbourhood& neighbourhood) {
  Service::current().serve([] { return true; });
  neighbourhood.ring();
}

void serve_until(Neighbourhood& neighbourhood, const std::function<bool()>& ready,
                 const std::function<std::optional<std::string>()>& look) {
  Service& service = Service::current();
  if (service.serve(ready)) return;
  Words bells(&neighbourhood, &HeapHead::bell);
  bells.add(neighbourhood.head().bell);  // Another thread of this process may have served.
  for (int spin = 0; spin < kSpins; ++spin) {
    bells.read();
    if (service.serve(ready)) return;
    for (int pause = 0; pause < 20 && !bells.changed(); ++pause) std::atomic_signal_fence(std::memory_order_seq_cst);
  }
  auto now = steady_clock::now();
  auto next_call = now + kPatience;
  auto next_look = now + kBetweenLooks;
  for (;;) {
    bells.read();
    if (service.serve(ready)) return;
    now = steady_clock::now();
    if (now >= next_call) {
      neighbourhood.call();
      next_call = now + kBetweenCalls;
    }
    if (now >= next_look) {
      const auto hopeless = look();
      // What a peer did before it left still counts.
      if (hopeless && service.serve(ready)) return;
      if (hopeless) throw std::runtime_error(*hopeless);
      next_look = now + kBetweenLooks;
    }
    bells.sleep(duration_cast<microseconds>(std::min(next_call, next_look) - now));
  }
}

}  // namespace fsdp::comm
