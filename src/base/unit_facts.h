#pragma once

#include <cstdint>
#include <string>

namespace fsdp {

/// The facts of a unit that must be the same on all ranks. They are sent in the header of each of the unit's collectives, so the struct is
/// small and has no padding.
struct UnitFacts {
  std::uint64_t layout =
      0;  ///< Hash of the parameters' names, shapes, dtypes and order, and of which ones are trained. 0: the call has no unit.
  std::uint64_t switches = 0;       ///< The boolean settings, one bit each; see `kSwitches`.
  std::uint64_t divide_factor = 0;  ///< The bits of the double by which the sum of gradients is divided.

  bool operator==(const UnitFacts&) const = default;
};

/// The names of the switches, which are those of their setters; the first is the lowest bit.
inline constexpr const char* kSwitches[] = {"requires_gradient_sync", "requires_all_reduce", "reshard_after_forward",
                                            "reshard_after_backward", "is_last_backward",    "manual_backward_finalization"};

/// Describes the first fact in which the two differ, with the value in `facts`. Empty if they are the same.
std::string describe_difference(const UnitFacts& facts, const UnitFacts& other);

}  // namespace fsdp
