#include "comm/launch/endings.h"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <thread>
#include <utility>

#include "base/process.h"
#include "base/stable_hash.h"
#include "base/text.h"
#include "events/event_ring.h"

namespace fsdp::comm {
namespace {

constexpr const char* kReturnedText = "returned";
constexpr std::chrono::milliseconds kBetweenAsks{50};
constexpr std::chrono::seconds kUntilItsWord{2};  // from the end of a function that owns the model to that of the program

struct EndingBoard {
  std::mutex mutex;
  c10::intrusive_ptr<c10d::Store> store;
  std::int64_t rank = 0;
  bool told = false;
};

/// A forked process does not report how the rank ends.
EndingBoard& board() { return of_this_process<EndingBoard>(); }

std::string ending_key(std::int64_t rank) { return "fsdp/ending/" + std::to_string(rank); }

}  // namespace

void tell_endings_by(c10::intrusive_ptr<c10d::Store> store, std::int64_t rank) {
  const std::lock_guard<std::mutex> lock(board().mutex);
  board().store = std::move(store);
  board().rank = rank;
}

void note_ending(Ending ending, const std::string& error) noexcept {
  using events::EndKind;
  const auto end = ending == Ending::kReturned ? EndKind::kReturned : ending == Ending::kStopped ? EndKind::kSignal : EndKind::kException;
  events::record_end(end, error);
}

void tell_ending(Ending ending, const std::string& error) noexcept {
  note_ending(ending, error);
  try {
    const std::lock_guard<std::mutex> lock(board().mutex);
    if (board().store == nullptr || std::exchange(board().told, true)) return;
    board().store->set(ending_key(board().rank), ending == Ending::kReturned ? kReturnedText : "failed");
  } catch (...) {  // The process that served the store has ended.
  }
}

bool is_first_to_say(const std::string& text) noexcept {
  try {
    const std::lock_guard<std::mutex> lock(board().mutex);
    return board().store == nullptr || board().store->add("fsdp/said/" + std::to_string(stable_hash(text)), 1) == 1;
  } catch (...) {
    return true;
  }
}

std::vector<std::int64_t> returned_among(const std::vector<std::int64_t>& ranks) noexcept {
  std::vector<std::int64_t> returned;
  try {
    const std::lock_guard<std::mutex> lock(board().mutex);
    if (board().store == nullptr || ranks.empty()) return returned;
    // A connection of its own: another thread may wait for something else by the same store, and keep it.
    const auto store = board().store->clone();
    const auto until = std::chrono::steady_clock::now() + kUntilItsWord;
    for (std::vector<std::int64_t> silent = ranks; !silent.empty() && returned.empty();) {
      std::erase_if(silent, [&](std::int64_t rank) {
        if (!store->check({ending_key(rank)})) return false;
        if (store->get_to_str(ending_key(rank)) == kReturnedText) returned.push_back(rank);
        return true;
      });
      if (std::chrono::steady_clock::now() > until) break;
      if (!silent.empty() && returned.empty()) std::this_thread::sleep_for(kBetweenAsks);
    }
  } catch (...) {  // The process that served the store has ended.
  }
  return returned;
}

std::string describe_ended(const std::vector<std::int64_t>& ranks) {
  return names_of_ranks(ranks) + " had ended " + (ranks.size() == 1 ? "its" : "their") +
         " training: the ranks take different numbers of steps, or some of them alone make a call that all must make, such as a save. "
         "FSDP_DEBUG=1 compares every collective.";
}

}  // namespace fsdp::comm
