#pragma once

#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

// Ranks report to each other how they have ended. A closed connection does not show whether a rank ended normally or failed.
namespace fsdp::comm {

enum class Ending : std::uint8_t {
  kReturned,  ///< Its training function, or its script, has ended normally.
  kFailed,    ///< Its own message has the reason.
  kStopped,   ///< It was stopped (Ctrl-C).
};

/// Sets the store in which the ranks of this process's world write how they end. It must outlive all ranks, as the store of torchrun's
/// agent does. Without such a store, nothing is written. Any thread may call this.
void tell_endings_by(c10::intrusive_ptr<c10d::Store> store, std::int64_t rank);

/// Reports how this rank has ended, also as an event, which has the text of the error; the first call counts. Returns at once.
void tell_ending(Ending ending, const std::string& error = {}) noexcept;
/// Reports it as an event only.
void note_ending(Ending ending, const std::string& error = {}) noexcept;

/// True if no other rank of this world has reported a failure with this text yet.
bool is_first_to_say(const std::string& text) noexcept;

/// Returns which of the given ranks have returned. As they may have closed their connections only a moment ago, this waits briefly for
/// their reports.
std::vector<std::int64_t> returned_among(const std::vector<std::int64_t>& ranks) noexcept;

/// Returns "rank 0 had ended its training: ...", and how to solve it.
std::string describe_ended(const std::vector<std::int64_t>& ranks);

}  // namespace fsdp::comm
