#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

// Plans which requests of a step can share memory. Pure arithmetic.
namespace fsdp::memory {

/// A request for `bytes`, alive from event `begin` until event `end` of a step; each acquire and release is an event.
struct SlotRequest {
  std::int64_t bytes = 0;
  std::size_t begin = 0;
  std::size_t end = 0;

  bool operator==(const SlotRequest&) const = default;
};

struct SlotPlan {
  std::vector<std::int64_t> capacities;  ///< The size of each slot in bytes.
  std::vector<std::size_t> slot_of;      ///< The slot of each request.

  std::int64_t total() const;
};

/// Plans slots for a step whose requests are known. Two requests that overlap never share a slot. The largest requests choose first, and
/// among equal ones the earliest. For requests of one size this is left-edge colouring, which needs no more slots than there are requests
/// alive at once.
SlotPlan plan_slots(std::span<const SlotRequest> requests);

}  // namespace fsdp::memory
