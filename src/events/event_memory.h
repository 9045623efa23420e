#pragma once

#include <sys/types.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "events/event.h"

// The memory of a process's events: its own, or a file that other processes may read at any time, also after this one has died.
namespace fsdp::events {

/// The process that wrote a file of events. Unknown numbers are -1. The first two members have the same place in all versions.
struct EventWriter {
  static constexpr std::array<char, 8> kFormat = {'f', 's', 'd', 'p', '-', 'e', 'v', 's'};
  static constexpr std::uint64_t kVersion = 3;

  std::array<char, 8> format = kFormat;
  std::uint64_t version = kVersion;
  std::int64_t rank = -1;  ///< Global.
  std::int64_t world_size = -1;
  std::int64_t process = -1;        ///< Its number in the system, in its own namespace.
  std::int64_t process_began = -1;  ///< See began(): a later process of the same number has another value.
  std::uint64_t processes = 0;      ///< See processes_id().
  std::uint64_t clock = 0;          ///< See clock_id().
  std::int64_t made = 0;            ///< When the file was made, in ns of std::chrono::steady_clock.
  std::int64_t ahead_of_epoch = 0;  ///< std::chrono::system_clock less steady_clock at that time, in ns.
  std::array<char, 64> host = {};   ///< The host's name, cut off.

  /// Returns that of this process, as `rank` of `world_size`.
  static EventWriter of_this_process(std::int64_t rank, std::int64_t world_size);
};

/// The time of events, in ns of std::chrono::steady_clock.
std::int64_t now();
/// A number that is the same for all processes that have one clock: those of one kernel, in one time namespace.
std::uint64_t clock_id();
/// A number that is the same for all processes that see each other by the same numbers.
std::uint64_t processes_id();
/// Returns when a process began, in ticks since the host was started; -1 if there is no process of this number.
std::int64_t began(std::int64_t process);

/// The last events of all threads of a process, and the names in them. This is the content of a file: it has no pointers, and zeroed memory
/// is an empty one. Writing an event takes no lock and no memory, and may be done by a signal handler.
///
/// An event is written between two changes of its entry's turn, so that a reader sees complete events only. A writer that is suspended
/// while the others write a complete ring may leave a mixed event.
class EventMemory {
 public:
  static constexpr std::size_t kEvents = 16384;
  static constexpr std::size_t kNames = 8192;
  static constexpr std::size_t kHighestName = 2 * kNames;  ///< The number of a name is at most this.
  static constexpr std::size_t kSources = 4096;
  static constexpr std::size_t kLongestName = 8192;  ///< Longer texts are cut off.

  EventMemory() = default;
  EventMemory(const EventMemory&) = delete;
  EventMemory& operator=(const EventMemory&) = delete;

  /// Any thread. Sets the event's time.
  void write(Event event) noexcept;
  /// Returns the events, the oldest first: at most kEvents, without those that are being written now. Any thread.
  std::vector<Event> read() const;
  /// How many events have been written. Any thread.
  std::uint64_t written() const noexcept { return written_.load(std::memory_order_acquire); }
  /// Records that the process is alive, even if it writes no events. Any thread.
  void note_alive() noexcept { alive_.store(now(), std::memory_order_relaxed); }
  /// Returns when that was last recorded; 0: never.
  std::int64_t alive() const noexcept { return alive_.load(std::memory_order_relaxed); }

  /// Returns the number of a name; 0 if the text is empty or not known. Any thread.
  std::uint32_t find_name(std::string_view text) const noexcept;
  /// Returns the number of a name, which may be new; 0 if it is empty, or if there is no room left. One thread at a time.
  std::uint32_t add_name(std::string_view text) noexcept;
  /// Returns the text of such a number.
  std::string_view text_of(std::uint32_t name) const noexcept;

  /// Records the name of a source. One thread at a time.
  void describe_source(std::uint32_t source, std::uint32_t name) noexcept;
  /// Returns the sources that have names: the name, and the source's number among those of this name, as in "dp_shard 0-7 #1". The n-th
  /// communicator of a row on one rank belongs to the n-th on another one.
  std::map<std::uint32_t, std::string> sources() const;

  /// Copies names, sources and events from another one into this one, which is empty. No names may be added meanwhile. An event that is
  /// being written meanwhile may be lost.
  void take_over(const EventMemory& other);
  /// Copies names and sources only.
  void take_over_names(const EventMemory& other) noexcept;
  /// Events up to this number (from 1) are no longer read. No events may be written meanwhile.
  void forget_until(std::uint64_t number) noexcept { forgotten_ = std::max(forgotten_, number); }
  /// Offsets in bytes, for readers that read only parts.
  struct Places {
    std::size_t written;  ///< The value of written().
    std::size_t entries;  ///< Events, each of `entry_bytes`: event n, from 1, is at (n - 1) % kEvents.
    std::size_t entry_bytes;
    std::size_t behind_entries;
    std::size_t texts;  ///< The texts of names; text_bytes() of these are used, and nothing follows them.
  };
  static Places places() noexcept;
  std::size_t text_bytes() const noexcept;

  /// Its process. The memory of a process has no file, and a writer with unknown numbers.
  const EventWriter& writer() const noexcept { return writer_; }
  /// Sets it, for a file of events.
  void sign(const EventWriter& writer) noexcept { writer_ = writer; }

 private:
  static constexpr std::size_t kWords = sizeof(Event) / sizeof(std::uint64_t);
  static constexpr std::size_t kPlaces = kHighestName;  // twice as many as names, so that lookups stay short
  static constexpr std::size_t kTextBytes = std::size_t{1} << 20;

  struct Entry {
    std::atomic<std::uint64_t> turn;  ///< The number of the event that it holds, from 1; 0: none, or one that is being written.
    std::array<std::atomic<std::uint64_t>, kWords> words;
  };
  /// The place of a text: its offset in the higher half, its length in the lower; 0: no text.
  using Place = std::atomic<std::uint64_t>;

  void put(const Event& event) noexcept;
  std::size_t place_of(std::string_view text) const noexcept;
  std::string_view text_at(std::uint64_t place) const noexcept;

  EventWriter writer_;  // All members are private, so that they lie one after the other.
  std::atomic<std::uint64_t> written_;
  std::uint64_t forgotten_;  ///< Events up to this one are not read.
  std::atomic<std::int64_t> alive_;
  std::array<Entry, kEvents> entries_;
  std::array<Place, kPlaces> names_;
  std::uint64_t name_count_;
  std::uint64_t text_bytes_;
  std::array<std::atomic<std::uint32_t>, kSources> sources_;  ///< Names, by source.
  std::array<char, kTextBytes> texts_;                        // The last member: a reader skips the unused part.
};
static_assert(sizeof(Event) % sizeof(std::uint64_t) == 0);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

}  // namespace fsdp::events
