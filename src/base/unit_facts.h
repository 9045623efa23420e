#pragma once

#include <cstdint>
#include <string>

namespace fsdp {

/// What all ranks must have alike of a unit, beside what a collective does with it. Travels in the header of each of its collectives, so it
/// is small, and has no padding.
struct UnitFacts {
  std::uint64_t layout = 0;         ///< Hash of the parameters' names, shapes, dtypes, order, and of which are trained. 0: of no unit.
  std::uint64_t switches = 0;       ///< What can be set to true or false: a bit for each, see `kSwitches`.
  std::uint64_t divide_factor = 0;  ///< The bits of the double that the sum of gradients is divided by.

  bool operator==(const UnitFacts&) const = default;
};

/// The switches as their setters name them; the first is the lowest bit.
inline constexpr const char* kSwitches[] = {"requires_gradient_sync", "requires_all_reduce", "reshard_after_forward",
                                            "reshard_after_backward", "is_last_backward",    "manual_backward_finalization"};

/// The first fact in which the two differ, as `facts` have it; empty where they are the same.
std::string describe_difference(const UnitFacts& facts, const UnitFacts& other);

}  // namespace fsdp
