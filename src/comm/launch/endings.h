#pragma once

#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

// How ranks have ended, for those that wait for them: a closed connection alone does not tell an end from a failure.
namespace fsdp::comm {

enum class Ending : std::uint8_t {
  kReturned,  ///< Its training function, or its script, has come to its end.
  kFailed,    ///< Its own message says why.
};

/// Where the ranks of this process's world tell how they end: a store that outlives all of them, as torchrun's agent serves. Without one,
/// nothing is told. Any thread.
void tell_endings_by(c10::intrusive_ptr<c10d::Store> store, std::int64_t rank);

/// Tells how this rank has ended; the first call counts. Returns at once.
void tell_ending(Ending ending) noexcept;

/// True if no other rank of this world has failed with this text yet, as far as they could tell each other.
bool is_first_to_say(const std::string& text) noexcept;

/// Those of these ranks that have returned. They have closed their connections a moment ago: waits a little for their word.
std::vector<std::int64_t> returned_among(const std::vector<std::int64_t>& ranks) noexcept;

/// "ranks 0, 2-3".
std::string names_of_ranks(std::vector<std::int64_t> ranks);

/// "rank 0 had ended its training: ...", and the way out.
std::string describe_ended(const std::vector<std::int64_t>& ranks);

}  // namespace fsdp::comm
