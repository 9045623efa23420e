#include "events/event_ring.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <memory>
#include <mutex>

#include "base/stable_hash.h"

namespace fsdp::events {

void EventRing::write(Event event) noexcept {
  event.time = std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
  const auto words = std::bit_cast<std::array<std::uint64_t, kWords>>(event);
  const std::uint64_t turn = written_.fetch_add(1, std::memory_order_relaxed) + 1;
  Entry& entry = entries_[(turn - 1) % kEvents];
  entry.turn.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);  // Who sees one of the words sees that the entry is being written.
  for (std::size_t i = 0; i < kWords; ++i) entry.words[i].store(words[i], std::memory_order_relaxed);
  entry.turn.store(turn, std::memory_order_release);
}

std::vector<Event> EventRing::read() const {
  const std::uint64_t end = written_.load(std::memory_order_acquire);
  std::vector<Event> events;
  for (std::uint64_t turn = end > kEvents ? end - kEvents + 1 : 1; turn <= end; ++turn) {
    const Entry& entry = entries_[(turn - 1) % kEvents];
    if (entry.turn.load(std::memory_order_acquire) != turn) continue;
    std::array<std::uint64_t, kWords> words{};
    for (std::size_t i = 0; i < kWords; ++i) words[i] = entry.words[i].load(std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_acquire);
    if (entry.turn.load(std::memory_order_relaxed) == turn) events.push_back(std::bit_cast<Event>(words));
  }
  return events;
}

namespace {

/// Texts by their hash, for lookups without a lock. Entries are never removed.
class NameTable {
 public:
  std::uint32_t find_or_add(std::string_view text) {
    if (text.empty()) return 0;
    std::size_t place = stable_hash(text) % kPlaces;
    for (;; place = (place + 1) % kPlaces) {
      const std::string* const held = texts_[place].load(std::memory_order_acquire);
      if (held == nullptr) break;
      if (*held == text) return static_cast<std::uint32_t>(place + 1);
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    // Another thread may have added it meanwhile, or something else at that place.
    for (;; place = (place + 1) % kPlaces) {
      const std::string* const held = texts_[place].load(std::memory_order_relaxed);
      if (held == nullptr) break;
      if (*held == text) return static_cast<std::uint32_t>(place + 1);
    }
    if (names_ == kPlaces / 2) return 0;  // Lookups stay short.
    ++names_;
    texts_[place].store(new std::string(text), std::memory_order_release);
    return static_cast<std::uint32_t>(place + 1);
  }

  std::string_view text_of(std::uint32_t name) const noexcept {
    if (name == 0 || name > kPlaces) return {};
    const std::string* const held = texts_[name - 1].load(std::memory_order_acquire);
    return held == nullptr ? std::string_view() : *held;
  }

 private:
  static constexpr std::size_t kPlaces = 16384;

  std::array<std::atomic<const std::string*>, kPlaces> texts_{};
  std::size_t names_ = 0;
  std::mutex mutex_;  // Who adds a name.
};

// Never destroyed: threads may write events until the process ends.
EventRing& ring() {
  static EventRing& ring = *new EventRing();
  return ring;
}
NameTable& names() {
  static NameTable& names = *new NameTable();
  return names;
}

std::atomic<std::uint32_t> sources{0};

}  // namespace

void record(const Event& event) noexcept { ring().write(event); }

std::vector<Event> recorded() { return ring().read(); }

std::uint32_t new_source() noexcept { return sources.fetch_add(1, std::memory_order_relaxed) + 1; }

std::uint32_t name_of(std::string_view text) { return names().find_or_add(text); }

std::string_view text_of(std::uint32_t name) noexcept { return names().text_of(name); }

}  // namespace fsdp::events
