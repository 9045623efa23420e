#include "memory/slot_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <random>
#include <vector>

namespace fsdp::memory {
namespace slot_plan_test {

/// Requests of random lengths over `events` moments.
std::vector<SlotRequest> random_requests(std::mt19937& random, std::size_t count, std::size_t events, std::int64_t most_bytes) {
  std::vector<SlotRequest> requests;
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t begin = random() % events;
    const std::size_t end = begin + 1 + random() % (events - begin);
    requests.push_back(
        {.bytes = 1 + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(most_bytes)), .begin = begin, .end = end});
  }
  return requests;
}

void expect_valid(const std::vector<SlotRequest>& requests, const SlotPlan& plan) {
  ASSERT_EQ(plan.slot_of.size(), requests.size());
  for (std::size_t a = 0; a < requests.size(); ++a) {
    EXPECT_LE(requests[a].bytes, plan.capacities.at(plan.slot_of[a]));
    for (std::size_t b = 0; b < a; ++b) {
      const bool overlap = requests[a].begin < requests[b].end && requests[b].begin < requests[a].end;
      EXPECT_FALSE(overlap && plan.slot_of[a] == plan.slot_of[b]) << a << " and " << b;
    }
  }
}

std::size_t most_alive(const std::vector<SlotRequest>& requests) {
  std::size_t most = 0;
  for (const auto& now : requests) {
    most = std::max(most, static_cast<std::size_t>(std::count_if(requests.begin(), requests.end(), [&](const SlotRequest& request) {
                      return request.begin <= now.begin && now.begin < request.end;
                    })));
  }
  return most;
}

/// The least total of all valid plans, by trying them.
std::int64_t least_total(const std::vector<SlotRequest>& requests) {
  std::int64_t least = 0;
  for (const auto& request : requests) least += request.bytes;
  std::vector<std::vector<std::size_t>> slots;
  const std::function<void(std::size_t)> place = [&](std::size_t next) {
    if (next == requests.size()) {
      std::int64_t total = 0;
      for (const auto& slot : slots) {
        std::int64_t capacity = 0;
        for (const auto request : slot) capacity = std::max(capacity, requests[request].bytes);
        total += capacity;
      }
      least = std::min(least, total);
      return;
    }
    for (std::size_t s = 0; s <= slots.size(); ++s) {
      if (s == slots.size()) {
        slots.push_back({next});
        place(next + 1);
        slots.pop_back();
        break;
      }
      const bool is_free = std::none_of(slots[s].begin(), slots[s].end(), [&](std::size_t other) {
        return requests[next].begin < requests[other].end && requests[other].begin < requests[next].end;
      });
      if (!is_free) continue;
      slots[s].push_back(next);
      place(next + 1);
      slots[s].pop_back();
    }
  };
  place(0);
  return least;
}

TEST(SlotPlan, NothingNeedsNothing) { EXPECT_EQ(plan_slots({}).total(), 0); }

TEST(SlotPlan, RequestsOfOneSizeNeedAsManySlotsAsAreAlive) {
  std::mt19937 random(1);
  for (int i = 0; i < 200; ++i) {
    const auto requests = random_requests(random, 1 + random() % 30, 40, 1);
    const auto plan = plan_slots(requests);
    expect_valid(requests, plan);
    EXPECT_EQ(plan.capacities.size(), most_alive(requests));
  }
}

TEST(SlotPlan, IsNearTheBestOfAll) {
  std::mt19937 random(2);
  double worst = 1;
  double sum = 0;
  constexpr int kCases = 200;
  for (int i = 0; i < kCases; ++i) {
    const auto requests = random_requests(random, 8, 12, 10);
    const auto plan = plan_slots(requests);
    expect_valid(requests, plan);
    const double ratio = static_cast<double>(plan.total()) / static_cast<double>(least_total(requests));
    EXPECT_GE(ratio, 1);
    worst = std::max(worst, ratio);
    sum += ratio;
  }
  EXPECT_LE(sum / kCases, 1.02);
  EXPECT_LE(worst, 1.5);
}

}  // namespace slot_plan_test
}  // namespace fsdp::memory
