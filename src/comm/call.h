#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

#include "comm/communicator.h"

namespace fsdp::comm {

/// What a rank does in one collective: the same on all ranks of the row, or they have diverged. Sent as bytes, between processes of one
/// build.
struct Call {
  std::uint64_t number = 0;    ///< Of the row's collectives, from 1.
  std::uint64_t identity = 0;  ///< Hash of the label and of sizes.
  std::uint64_t model = 0;
  UnitFacts facts;
  std::int64_t bytes = 0;   ///< Of one rank's shard; 0 where they differ.
  char operation[48] = {};  ///< Cut off where it is longer, as are the others; `identity` covers all of them.
  char unit[192] = {};
  char updates[192] = {};

  bool operator==(const Call&) const = default;
};

/// `sizes` is a hash of what else must agree.
Call make_call(std::uint64_t number, const Label& label, std::int64_t bytes, std::uint64_t sizes);

/// "the ranks make different calls: rank 0: ...; rank 1: ...", and the way out.
std::string describe_divergence(const Call& a, int rank_a, const Call& b, int rank_b);

/// This rank and another one are at different collectives, or another one says why it has given up. The message is for all ranks.
class RowFailure : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// " of unit 'blocks.0'", " of the root unit", or nothing for what is no unit: "" and all others that a parenthesis begins.
std::string of_unit(std::string_view unit);

/// Mixes a number into a hash; the same on every rank.
constexpr std::uint64_t mix(std::uint64_t hash, std::uint64_t value) {
  hash = (hash ^ value) * 0x9e3779b97f4a7c15ULL;
  return hash ^ (hash >> 29);
}

// Tags of messages. c10d takes 31 bits; the upper ones say what a message is for, so that no two kinds ever match.
namespace tags {

/// Of the i-th message of a collective's data. Other collectives have other tags, but for one chance in 2^30: ranks that diverge do not
/// receive each other's data.
constexpr int data(const Call& call, std::size_t i) {
  const std::uint64_t hash = mix(mix(mix(0, call.number), call.identity), i);
  return static_cast<int>(0x40000000u | static_cast<std::uint32_t>(hash >> 34));
}

/// These two follow from the number alone: they are what ranks compare. A tag's former user is long complete when it comes again.
constexpr int header(std::uint64_t number) { return static_cast<int>(number & 0x0fffffffu); }
constexpr int comparison(std::uint64_t number) { return static_cast<int>(0x10000000u | (number & 0x0fffffffu)); }

inline constexpr int kAlarm = 0x20000000;     ///< Why a rank gives up.
inline constexpr int kSentinel = 0x20000001;  ///< Never sent.

}  // namespace tags
}  // namespace fsdp::comm
