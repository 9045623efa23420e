#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

// Pure arithmetic: which requests of a step can share memory.
namespace fsdp::memory {

/// A request for `bytes`, alive from event `begin` until event `end` of a step; each acquire and release is an event.
struct Lease {
  std::int64_t bytes = 0;
  std::size_t begin = 0;
  std::size_t end = 0;

  bool operator==(const Lease&) const = default;
};

struct SlotPlan {
  std::vector<std::int64_t> capacities;  ///< Of each slot, bytes.
  std::vector<std::size_t> slot_of;      ///< Of each lease.

  std::int64_t total() const;
};

/// Slots for a step whose leases are known: no two leases that overlap share a slot. The largest leases choose first, and among equals the
/// earliest: for leases of one size this is left-edge colouring, which needs as few slots as are ever alive at once.
SlotPlan plan_slots(std::span<const Lease> leases);

}  // namespace fsdp::memory
