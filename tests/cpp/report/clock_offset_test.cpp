#include "report/clock_offset.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>

#include "support/meshes.h"
#include "support/multi_rank.h"

namespace clock_offset_test {

using fsdp::report::clock_offset;
using fsdp::report::measured_offset;
using fsdp::testing::line;
using fsdp::testing::plane;
using fsdp::testing::run_ranks;

constexpr std::int64_t kAhead = 3'000'000'000;  // ns, from rank to rank
constexpr std::int64_t kExact = 100'000'000;    // as far as a busy machine allows

TEST(ClockOffset, RanksOfOneHostHaveOneClock) {
  run_ranks(2, [](int) { EXPECT_EQ(clock_offset(fsdp::comm::Ranks(line())), 0); });
}

TEST(ClockOffset, OtherClocksAreMeasured) {
  for (const bool two_dimensions : {false, true}) {
    run_ranks(4, [&](int rank) {
      const fsdp::comm::Ranks ranks(two_dimensions ? plane() : line());
      const auto offset = measured_offset(ranks, [&] { return fsdp::report::now() + rank * kAhead; });
      EXPECT_LT(std::abs(offset - rank * kAhead), kExact) << offset;
    });
  }
}

}  // namespace clock_offset_test
