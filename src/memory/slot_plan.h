#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

// Plans which requests of a step can share memory. Pure arithmetic.
namespace fsdp::memory {

/// A request for `bytes`, alive from event `begin` until event `end` of a step; each acquire and release is an event.
struct Lease {
  std::int64_t bytes = 0;
  std::size_t begin = 0;
  std::size_t end = 0;

  bool operator==(const Lease&) const = default;
};

struct SlotPlan {
  std::vector<std::int64_t> capacities;  ///< The size of each slot in bytes.
  std::vector<std::size_t> slot_of;      ///< The slot of each lease.

  std::int64_t total() const;
};

/// Plans slots for a step whose leases are known. Two leases that overlap never share a slot. The largest leases choose first, and among
/// equal ones the earliest. For leases of one size this is left-edge colouring, which needs no more slots than there are leases alive at
/// once.
SlotPlan plan_slots(std::span<const Lease> leases);

}  // namespace fsdp::memory
