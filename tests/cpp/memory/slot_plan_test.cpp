#include "memory/slot_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <random>
#include <vector>

namespace fsdp::memory {
namespace slot_plan_test {

/// Leases of random lengths over `events` moments.
std::vector<Lease> random_leases(std::mt19937& random, std::size_t count, std::size_t events, std::int64_t most_bytes) {
  std::vector<Lease> leases;
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t begin = random() % events;
    const std::size_t end = begin + 1 + random() % (events - begin);
    leases.push_back(
        {.bytes = 1 + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(most_bytes)), .begin = begin, .end = end});
  }
  return leases;
}

void expect_valid(const std::vector<Lease>& leases, const SlotPlan& plan) {
  ASSERT_EQ(plan.slot_of.size(), leases.size());
  for (std::size_t a = 0; a < leases.size(); ++a) {
    EXPECT_LE(leases[a].bytes, plan.capacities.at(plan.slot_of[a]));
    for (std::size_t b = 0; b < a; ++b) {
      const bool overlap = leases[a].begin < leases[b].end && leases[b].begin < leases[a].end;
      EXPECT_FALSE(overlap && plan.slot_of[a] == plan.slot_of[b]) << a << " and " << b;
    }
  }
}

std::size_t most_alive(const std::vector<Lease>& leases) {
  std::size_t most = 0;
  for (const auto& now : leases) {
    most = std::max(most, static_cast<std::size_t>(std::count_if(leases.begin(), leases.end(), [&](const Lease& lease) {
                      return lease.begin <= now.begin && now.begin < lease.end;
                    })));
  }
  return most;
}

/// The least total of all valid plans, by trying them.
std::int64_t least_total(const std::vector<Lease>& leases) {
  std::int64_t least = 0;
  for (const auto& lease : leases) least += lease.bytes;
  std::vector<std::vector<std::size_t>> slots;
  const std::function<void(std::size_t)> place = [&](std::size_t next) {
    if (next == leases.size()) {
      std::int64_t total = 0;
      for (const auto& slot : slots) {
        std::int64_t capacity = 0;
        for (const auto lease : slot) capacity = std::max(capacity, leases[lease].bytes);
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
        return leases[next].begin < leases[other].end && leases[other].begin < leases[next].end;
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

TEST(SlotPlan, LeasesOfOneSizeNeedAsManySlotsAsAreAlive) {
  std::mt19937 random(1);
  for (int i = 0; i < 200; ++i) {
    const auto leases = random_leases(random, 1 + random() % 30, 40, 1);
    const auto plan = plan_slots(leases);
    expect_valid(leases, plan);
    EXPECT_EQ(plan.capacities.size(), most_alive(leases));
  }
}

TEST(SlotPlan, IsNearTheBestOfAll) {
  std::mt19937 random(2);
  double worst = 1;
  double sum = 0;
  constexpr int kCases = 200;
  for (int i = 0; i < kCases; ++i) {
    const auto leases = random_leases(random, 8, 12, 10);
    const auto plan = plan_slots(leases);
    expect_valid(leases, plan);
    const double ratio = static_cast<double>(plan.total()) / static_cast<double>(least_total(leases));
    EXPECT_GE(ratio, 1);
    worst = std::max(worst, ratio);
    sum += ratio;
  }
  EXPECT_LE(sum / kCases, 1.02);
  EXPECT_LE(worst, 1.5);
}

}  // namespace slot_plan_test
}  // namespace fsdp::memory
