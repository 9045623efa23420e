#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace fsdp::replay {

/// A digest that one rank has computed.
struct Vote {
  std::int64_t rank = 0;  ///< Global.
  std::int64_t value = 0;
};

/// The result of votes that should be the same.
struct Verdict {
  bool agreed = true;               ///< They are.
  bool decided = false;             ///< They are not, and more than half of them are.
  std::vector<std::int64_t> wrong;  ///< The ranks that are outvoted, each once; none if nothing is decided.
  std::vector<std::int64_t> right;  ///< The others, each once.
};

/// Decides by majority: of three votes, two; of four (two ranks, two votes each), three.
Verdict decide(std::span<const Vote> votes);

}  // namespace fsdp::replay
