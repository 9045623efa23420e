// Which units a memory budget keeps, against all sets of units.

#include "plan/kept_units.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

namespace kept_units_test {

using fsdp::planning::choose_kept;
using fsdp::planning::Keepable;
using fsdp::planning::KeptUnits;

struct Problem {
  std::vector<std::int64_t> loads;
  std::vector<Keepable> units;
};

std::int64_t peak_of(const Problem& problem, const std::vector<bool>& kept) {
  std::int64_t peak = 0;
  for (std::size_t t = 0; t < problem.loads.size(); ++t) {
    auto bytes = problem.loads[t];
    for (std::size_t k = 0; k < kept.size(); ++k) {
      const auto& unit = problem.units[k];
      if (kept[k] && unit.begin <= t && t < unit.end) bytes += unit.bytes;
    }
    peak = std::max(peak, bytes);
  }
  return peak;
}

std::int64_t saved_by(const Problem& problem, const std::vector<bool>& kept) {
  std::int64_t saved = 0;
  for (std::size_t k = 0; k < kept.size(); ++k) saved += kept[k] ? problem.units[k].saved : 0;
  return saved;
}

KeptUnits best_of_all_sets(const Problem& problem, std::int64_t limit) {
  KeptUnits best{.kept = std::vector<bool>(problem.units.size()), .saved = 0, .peak = peak_of(problem, {})};
  for (std::uint32_t set = 0; set < (1U << problem.units.size()); ++set) {
    std::vector<bool> kept;
    for (std::size_t k = 0; k < problem.units.size(); ++k) kept.push_back((set >> k & 1U) != 0);
    const auto peak = peak_of(problem, kept);
    const auto saved = saved_by(problem, kept);
    if (peak > limit || saved < best.saved || (saved == best.saved && peak >= best.peak)) continue;
    best = {.kept = kept, .saved = saved, .peak = peak};
  }
  return best;
}

/// A chain of blocks: forward uses them in their order, backward in the reverse one.
Problem chain(std::mt19937& random, std::size_t blocks, std::int64_t sizes) {
  const auto below = [&](std::int64_t bound) { return std::uniform_int_distribution<std::int64_t>(0, bound - 1)(random); };
  Problem problem;
  for (std::size_t t = 0; t < 2 * blocks + 2; ++t) problem.loads.push_back(below(40));
  for (std::size_t k = 0; k < blocks; ++k) {
    const auto bytes = 1 + below(sizes);
    problem.units.push_back({.begin = k + 1, .end = 2 * blocks - k, .bytes = bytes, .saved = below(3) == 0 ? 1 + below(9) : bytes});
  }
  return problem;
}

TEST(KeptUnits, SaveAsMuchAsTheBestOfAllSets) {
  std::mt19937 random(7);
  for (int k = 0; k < 400; ++k) {
    auto problem = chain(random, 1 + static_cast<std::size_t>(k) % 10, k % 3 == 0 ? 2 : 30);
    std::ranges::shuffle(problem.units, random);
    const auto least = peak_of(problem, {});
    for (const std::int64_t more : {-1, 0, 5, 17, 40, 1000}) {
      SCOPED_TRACE(testing::Message() << k << ", limit " << least + more);
      const auto found = choose_kept(problem.loads, problem.units, least + more);
      const auto best = best_of_all_sets(problem, least + more);
      EXPECT_EQ(found.saved, best.saved);
      EXPECT_EQ(found.peak, best.peak);
      EXPECT_EQ(found.saved, saved_by(problem, found.kept));
      EXPECT_EQ(found.peak, peak_of(problem, found.kept));
    }
  }
}

TEST(KeptUnits, OfEqualUnitsAreTheLastOnes) {
  const Problem problem{.loads = {9, 9, 9, 9, 9, 9, 9, 9},
                        .units = {{.begin = 1, .end = 7, .bytes = 4, .saved = 2},
                                  {.begin = 2, .end = 6, .bytes = 4, .saved = 2},
                                  {.begin = 3, .end = 5, .bytes = 4, .saved = 2}}};
  EXPECT_EQ(choose_kept(problem.loads, problem.units, 13).kept, (std::vector<bool>{false, false, true}));
  EXPECT_EQ(choose_kept(problem.loads, problem.units, 17).kept, (std::vector<bool>{false, true, true}));
}

TEST(KeptUnits, FitWhereIntervalsDoNotNest) {
  std::mt19937 random(8);
  const auto below = [&](std::size_t bound) { return std::uniform_int_distribution<std::size_t>(0, bound - 1)(random); };
  for (int k = 0; k < 300; ++k) {
    Problem problem;
    for (int t = 0; t < 20; ++t) problem.loads.push_back(static_cast<std::int64_t>(below(20)));
    for (int unit = 0; unit < 7; ++unit) {
      const auto bytes = static_cast<std::int64_t>(1 + below(20));
      problem.units.push_back({.begin = below(10), .end = 11 + below(10), .bytes = bytes, .saved = bytes});
    }
    for (const std::int64_t limit : {20, 35, 60, 200}) {
      const auto found = choose_kept(problem.loads, problem.units, limit);
      EXPECT_LE(peak_of(problem, found.kept), limit);
      EXPECT_LE(found.saved, best_of_all_sets(problem, limit).saved);
    }
    EXPECT_EQ(choose_kept(problem.loads, problem.units, 1000).saved, saved_by(problem, std::vector<bool>(7, true)));
  }
}

TEST(KeptUnits, OfVeryManyDifferentSizesFit) {
  std::mt19937 random(9);
  const auto problem = chain(random, 100, 1'000'000'000);
  for (const std::int64_t limit : {1'000'000'000LL, 20'000'000'000LL}) {
    const auto found = choose_kept(problem.loads, problem.units, limit);
    EXPECT_LE(peak_of(problem, found.kept), limit);
    EXPECT_GE(static_cast<double>(saved_by(problem, found.kept)), 0.95 * static_cast<double>(limit));  // Nearly all of it is used.
  }
}

}  // namespace kept_units_test
