#include "memory/slot_plan.h"

#include <algorithm>
#include <map>
#include <numeric>

namespace fsdp::memory {

std::int64_t SlotPlan::total() const { return std::accumulate(capacities.begin(), capacities.end(), std::int64_t{0}); }

SlotPlan plan_slots(std::span<const SlotRequest> requests) {
  std::vector<std::size_t> order(requests.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return requests[a].bytes != requests[b].bytes ? requests[a].bytes > requests[b].bytes : requests[a].begin < requests[b].begin;
  });
  SlotPlan plan;
  plan.slot_of.resize(requests.size());
  std::vector<std::map<std::size_t, std::size_t>> taken;  // for each slot, the ranges [begin, end) of its requests
  const auto is_free = [](const std::map<std::size_t, std::size_t>& intervals, const SlotRequest& request) {
    const auto next = intervals.lower_bound(request.begin);
    if (next != intervals.end() && next->first < request.end) return false;
    return next == intervals.begin() || std::prev(next)->second <= request.begin;
  };
  for (const auto index : order) {
    const auto& request = requests[index];
    const auto slot = std::find_if(taken.begin(), taken.end(), [&](const auto& intervals) { return is_free(intervals, request); });
    plan.slot_of[index] = static_cast<std::size_t>(slot - taken.begin());
    if (slot == taken.end()) {
      taken.push_back({{request.begin, request.end}});
      plan.capacities.push_back(request.bytes);
    } else {
      slot->emplace(request.begin, request.end);
    }
  }
  return plan;
}

}  // namespace fsdp::memory
