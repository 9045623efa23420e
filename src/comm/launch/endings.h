#pragma once

#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

// Ranks tell each other how they have ended. A closed connection alone does not tell a normal end from a failure.
namespace fsdp::comm {

enum class Ending : std::uint8_t {
  kReturned,  ///< Its training function, or its script, has ended normally.
  kFailed,    ///< Its own message says why.
  kStopped,   ///< Somebody has stopped it (Ctrl-C).
};

/// Sets the store in which the ranks of this process's world write how they end. It must outlive all ranks, as the store of torchrun's
/// agent does. Without such a store, nothing is written. Any thread may call this.
void tell_endings_by(c10::intrusive_ptr<c10d::Store> store, std::int64_t rank);

/// Tells how this rank has ended, also as an event, which has the text of the error; the first call counts. Returns at once.
void tell_ending(Ending ending, const std::string& error = {}) noexcept;
/// The same as an event only.
void note_ending(Ending ending, const std::string& error = {}) noexcept;

/// True if no other rank of this world has failed with this text yet, as far as they could tell each other.
bool is_first_to_say(const std::string& text) noexcept;

/// Returns which of the given ranks have returned. As they may have closed their connections only a moment ago, this waits a little for
/// what they write.
std::vector<std::int64_t> returned_among(const std::vector<std::int64_t>& ranks) noexcept;

/// Returns "rank 0 had ended its training: ...", and how to solve it.
std::string describe_ended(const std::vector<std::int64_t>& ranks);

}  // namespace fsdp::comm
