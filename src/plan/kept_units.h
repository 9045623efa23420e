#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

// Chooses which units stay gathered between forward and backward. Pure arithmetic.
namespace fsdp::planning {

/// A unit that may stay gathered from forward into backward.
struct Keepable {
  std::size_t begin = 0;   ///< The first moment of a step at which it takes memory only because it is kept.
  std::size_t end = 0;     ///< The moment after the last one. A unit without such a moment is not kept.
  std::int64_t bytes = 0;  ///< Of its unsharded parameters.
  std::int64_t saved = 0;  ///< The bytes that this rank saves in a step.
};

struct KeptUnits {
  std::vector<bool> kept;  ///< One per unit.
  std::int64_t saved = 0;  ///< By all of them.
  std::int64_t peak = 0;   ///< The most bytes at a moment.
};

/// Returns the units that save most, such that no moment of a step needs more than `limit` bytes. Of several such sets, one with the lowest
/// peak. `loads` are the bytes of each moment if nothing is kept. If they are above the limit already, nothing is kept.
///
/// The intervals of units nest, because backward needs last what forward used first. This makes the sum over the outer units the only state
/// of a dynamic program, which is exact as long as there are not more than some thousand different sums. Intervals that do not nest are
/// extended, and very many sums are rounded. The set then fits, too, but a better one may exist.
KeptUnits choose_kept(std::span<const std::int64_t> loads, std::span<const Keepable> units, std::int64_t limit);

}  // namespace fsdp::planning
