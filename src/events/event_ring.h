#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "events/event.h"

// The last events of this process, always on.
namespace fsdp::events {

/// The last events of a process, whichever thread they are of. Writing takes no lock and no memory.
///
/// An entry is written between two changes of its turn, so that a reader sees whole events only. A writer that is held up while all others
/// write a whole ring may leave a mixed event behind.
class EventRing {
 public:
  static constexpr std::size_t kEvents = 16384;

  /// Any thread. Sets the event's time.
  void write(Event event) noexcept;
  /// The events that are there, the oldest first: at most kEvents, less those that are being written now. Any thread.
  std::vector<Event> read() const;

 private:
  static constexpr std::size_t kWords = sizeof(Event) / sizeof(std::uint64_t);
  struct Entry {
    std::atomic<std::uint64_t> turn{0};  ///< The number of the event that it holds, from 1; 0: none, or one that is being written.
    std::array<std::atomic<std::uint64_t>, kWords> words{};
  };

  std::atomic<std::uint64_t> written_{0};
  std::array<Entry, kEvents> entries_{};
};
static_assert(sizeof(Event) % sizeof(std::uint64_t) == 0);

/// Writes the event to the ring of this process.
void record(const Event& event) noexcept;
/// The events of this process that are still in its ring.
std::vector<Event> recorded();

/// A number for an engine or a row, which no other one of this process has.
std::uint32_t new_source() noexcept;

/// The number of a name in this process. A name's first use allocates and takes a lock; later ones do neither. 0 is the name of nothing,
/// "", and also of names for which there is no room any more (thousands).
std::uint32_t name_of(std::string_view text);
/// The text of such a number, for as long as the process lives.
std::string_view text_of(std::uint32_t name) noexcept;

}  // namespace fsdp::events
