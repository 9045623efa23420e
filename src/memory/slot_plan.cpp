#include "memory/slot_plan.h"

#include <algorithm>
#include <map>
#include <numeric>

namespace fsdp::memory {

std::int64_t SlotPlan::total() const { return std::accumulate(capacities.begin(), capacities.end(), std::int64_t{0}); }

SlotPlan plan_slots(std::span<const Lease> leases) {
  std::vector<std::size_t> order(leases.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return leases[a].bytes != leases[b].bytes ? leases[a].bytes > leases[b].bytes : leases[a].begin < leases[b].begin;
  });
  SlotPlan plan;
  plan.slot_of.resize(leases.size());
  std::vector<std::map<std::size_t, std::size_t>> taken;  // for each slot, the ranges [begin, end) of its leases
  const auto is_free = [](const std::map<std::size_t, std::size_t>& intervals, const Lease& lease) {
    const auto next = intervals.lower_bound(lease.begin);
    if (next != intervals.end() && next->first < lease.end) return false;
    return next == intervals.begin() || std::prev(next)->second <= lease.begin;
  };
  for (const auto index : order) {
    const auto& lease = leases[index];
    const auto slot = std::find_if(taken.begin(), taken.end(), [&](const auto& intervals) { return is_free(intervals, lease); });
    plan.slot_of[index] = static_cast<std::size_t>(slot - taken.begin());
    if (slot == taken.end()) {
      taken.push_back({{lease.begin, lease.end}});
      plan.capacities.push_back(lease.bytes);
    } else {
      slot->emplace(lease.begin, lease.end);
    }
  }
  return plan;
}

}  // namespace fsdp::memory
