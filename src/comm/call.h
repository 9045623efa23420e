#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

#include "base/stable_hash.h"
#include "comm/communicator.h"

namespace fsdp::comm {

/// Describes one collective as a rank calls it. If the descriptions of two ranks of a row differ, the ranks have diverged. It is sent as
/// bytes, between processes of the same build.
struct Call {
  std::uint64_t number = 0;    ///< The number of the collective in its row, from 1.
  std::uint64_t identity = 0;  ///< A hash of the label and of sizes.
  std::uint64_t model = 0;
  UnitFacts facts;
  std::int64_t bytes = 0;   ///< The size of one rank's shard; 0 if the ranks' shards differ in size.
  char operation[48] = {};  ///< Longer texts are cut off, here and below; `identity` covers all of each text.
  char unit[192] = {};
  char updates[192] = {};

  bool operator==(const Call&) const = default;
};

/// Makes the description. `sizes` is a hash of everything else that must be the same on all ranks.
Call make_call(std::uint64_t number, const Label& label, std::int64_t bytes, std::uint64_t sizes);

/// Returns "the ranks make different calls: rank 0: ...; rank 1: ...", and how to solve it.
std::string describe_divergence(const Call& a, int rank_a, const Call& b, int rank_b);

/// This rank and another one have called different collectives, or another rank has reported why it failed. The message is for all ranks.
class RowFailure : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Returns " of unit 'blocks.0'" or " of the root unit". Returns nothing for labels that are not units: "" and all others that begin with a
/// parenthesis.
std::string of_unit(std::string_view unit);

// Tags of messages. c10d takes 31 bits; the upper ones identify the kind of a message, so that messages of different kinds never match.
namespace tags {

/// The tag of the i-th message of a collective's data. Two collectives have different tags (except with a probability of 2^-30), so ranks
/// that diverge do not receive each other's data.
constexpr int data(const Call& call, std::size_t i) {
  const std::uint64_t hash = mix(mix(mix(0, call.number), call.identity), i);
  return static_cast<int>(0x40000000u | static_cast<std::uint32_t>(hash >> 34));
}

/// The tags of headers depend on the collective's number alone, so that ranks which diverge can compare their calls. When a number is
/// reused, the collective that had it before is long complete.
constexpr int header(std::uint64_t number) { return static_cast<int>(number & 0x0fffffffu); }
constexpr int comparison(std::uint64_t number) { return static_cast<int>(0x10000000u | (number & 0x0fffffffu)); }

inline constexpr int kAlarm = 0x20000000;     ///< The tag of the message in which a rank reports why it fails.
inline constexpr int kSentinel = 0x20000001;  ///< The tag of a message that is never sent: its receive ends only when the connection does.

}  // namespace tags
}  // namespace fsdp::comm
