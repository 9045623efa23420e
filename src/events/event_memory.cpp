#include "events/event_memory.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>

#include "base/stable_hash.h"
#include "events/process_stat.h"

namespace fsdp::events {
namespace {

using std::chrono::duration_cast;
using std::chrono::nanoseconds;

/// A namespace of this process, under this start of the kernel.
std::uint64_t id_of_namespace(const char* kind) {
  std::string id;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), id);
  std::error_code none;
  return stable_hash(id + std::filesystem::read_symlink(std::string("/proc/self/ns/") + kind, none).string());
}

}  // namespace

std::int64_t now() { return duration_cast<nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

std::uint64_t clock_id() { return id_of_namespace("time"); }

std::uint64_t processes_id() { return id_of_namespace("pid"); }

std::int64_t began(std::int64_t process) {
  const auto fields = process_stat(process);
  constexpr std::size_t kStartTime = 19;
  return fields.size() > kStartTime ? std::stoll(fields[kStartTime]) : -1;
}

EventWriter EventWriter::of_this_process(std::int64_t rank, std::int64_t world_size) {
  EventWriter writer;
  writer.rank = rank;
  writer.world_size = world_size;
  writer.process = getpid();
  writer.process_began = began(getpid());
  writer.processes = processes_id();
  writer.clock = clock_id();
  writer.made = now();
  writer.ahead_of_epoch = duration_cast<nanoseconds>(std::chrono::system_clock::now().time_since_epoch()).count() - now();
  gethostname(writer.host.data(), writer.host.size() - 1);
  return writer;
}

void EventMemory::write(Event event) noexcept {
  event.time = now();
  put(event);
}

void EventMemory::put(const Event& event) noexcept {
  const auto words = std::bit_cast<std::array<std::uint64_t, kWords>>(event);
  const std::uint64_t turn = written_.fetch_add(1, std::memory_order_relaxed) + 1;
  Entry& entry = entries_[(turn - 1) % kEvents];
  entry.turn.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);  // A reader that sees one of the words also sees that the entry is being written.
  for (std::size_t i = 0; i < kWords; ++i) entry.words[i].store(words[i], std::memory_order_relaxed);
  entry.turn.store(turn, std::memory_order_release);
}

std::vector<Event> EventMemory::read() const {
  const std::uint64_t end = written_.load(std::memory_order_acquire);
  std::vector<Event> events;
  events.reserve(std::min<std::uint64_t>(end, kEvents));
  for (std::uint64_t turn = std::max(end > kEvents ? end - kEvents : 0, forgotten_) + 1; turn <= end; ++turn) {
    const Entry& entry = entries_[(turn - 1) % kEvents];
    if (entry.turn.load(std::memory_order_acquire) != turn) continue;
    std::array<std::uint64_t, kWords> words{};
    for (std::size_t i = 0; i < kWords; ++i) words[i] = entry.words[i].load(std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_acquire);
    if (entry.turn.load(std::memory_order_relaxed) == turn) events.push_back(std::bit_cast<Event>(words));
  }
  return events;
}

EventMemory::Places EventMemory::places() noexcept {
  return {.written = offsetof(EventMemory, written_),
          .entries = offsetof(EventMemory, entries_),
          .entry_bytes = sizeof(Entry),
          .behind_entries = offsetof(EventMemory, names_),
          .texts = offsetof(EventMemory, texts_)};
}

std::size_t EventMemory::text_bytes() const noexcept { return std::min<std::uint64_t>(text_bytes_, kTextBytes); }

/// The place of the text, or the free one where it belongs. A damaged file has neither: kPlaces.
std::size_t EventMemory::place_of(std::string_view text) const noexcept {
  const std::size_t first = stable_hash(text) % kPlaces;
  for (std::size_t i = 0; i < kPlaces; ++i) {
    const std::size_t place = (first + i) % kPlaces;
    const auto held = names_[place].load(std::memory_order_acquire);
    if (held == 0 || text_at(held) == text) return place;
  }
  return kPlaces;
}

std::string_view EventMemory::text_at(std::uint64_t place) const noexcept {
  const auto offset = place >> 32;
  const auto length = place & 0xffffffff;
  if (offset + length > kTextBytes) return {};  // A file may be damaged.
  return {texts_.data() + offset, length};
}

std::uint32_t EventMemory::find_name(std::string_view text) const noexcept {
  text = text.substr(0, kLongestName);
  if (text.empty()) return 0;
  const auto place = place_of(text);
  return place == kPlaces || names_[place].load(std::memory_order_acquire) == 0 ? 0 : static_cast<std::uint32_t>(place + 1);
}

std::uint32_t EventMemory::add_name(std::string_view text) noexcept {
  text = text.substr(0, kLongestName);
  if (const auto found = find_name(text); found != 0 || text.empty()) return found;
  if (name_count_ == kNames || text_bytes_ + text.size() > kTextBytes) return 0;
  const auto place = place_of(text);
  std::memcpy(texts_.data() + text_bytes_, text.data(), text.size());
  names_[place].store(text_bytes_ << 32 | text.size(), std::memory_order_release);
  text_bytes_ += text.size();
  ++name_count_;
  return static_cast<std::uint32_t>(place + 1);
}

std::string_view EventMemory::text_of(std::uint32_t name) const noexcept {
  return name == 0 || name > kPlaces ? std::string_view() : text_at(names_[name - 1].load(std::memory_order_acquire));
}

void EventMemory::describe_source(std::uint32_t source, std::uint32_t name) noexcept {
  if (source < kSources) sources_[source].store(name, std::memory_order_release);
}

std::map<std::uint32_t, std::string> EventMemory::sources() const {
  std::map<std::uint32_t, std::string> described;
  std::map<std::string_view, int> counts;
  for (std::uint32_t source = 0; source < kSources; ++source) {
    const auto what = text_of(sources_[source].load(std::memory_order_acquire));
    if (!what.empty()) described[source] = std::string(what) + " #" + std::to_string(++counts[what]);
  }
  return described;
}

void EventMemory::take_over_names(const EventMemory& other) noexcept {
  for (std::size_t i = 0; i < kPlaces; ++i) names_[i].store(other.names_[i].load(std::memory_order_relaxed), std::memory_order_relaxed);
  name_count_ = other.name_count_;
  text_bytes_ = other.text_bytes_;
  std::memcpy(texts_.data(), other.texts_.data(), other.text_bytes_);
  for (std::size_t i = 0; i < kSources; ++i)
    sources_[i].store(other.sources_[i].load(std::memory_order_relaxed), std::memory_order_relaxed);
}

void EventMemory::take_over(const EventMemory& other) {
  take_over_names(other);
  for (const auto& event : other.read()) put(event);
}

}  // namespace fsdp::events
