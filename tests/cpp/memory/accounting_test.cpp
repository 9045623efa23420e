#include "memory/accounting.h"

#include <gtest/gtest.h>

namespace fsdp::memory {
namespace accounting_test {

TEST(Accounting, CountsEachKindByItself) {
  Accounting accounting;
  accounting.add(Kind::kMainParameters, 1);
  accounting.add(Kind::kMainGradients, 20);
  accounting.add(Kind::kGatheredParameters, 300);
  accounting.add(Kind::kUnreducedGradients, 4000);
  accounting.add(Kind::kCommunication, 50000);
  accounting.add(Kind::kOptimizerState, 600000);
  const auto stats = accounting.stats();
  EXPECT_EQ(stats.main_parameters.live, 1);
  EXPECT_EQ(stats.main_gradients.live, 20);
  EXPECT_EQ(stats.gathered_parameters.live, 300);
  EXPECT_EQ(stats.unreduced_gradients.live, 4000);
  EXPECT_EQ(stats.communication.live, 50000);
  EXPECT_EQ(stats.optimizer_state.live, 600000);
  EXPECT_EQ(stats.total.live, 654321);
  EXPECT_EQ(stats.total.peak, 654321);
  EXPECT_EQ(stats.slots.live, 0);
  EXPECT_EQ(stats.slot_allocations, 0);
}

TEST(Accounting, PeaksStayWhenBytesGo) {
  Accounting accounting;
  accounting.add(Kind::kGatheredParameters, 100);
  accounting.add(Kind::kGatheredParameters, 50);
  accounting.remove(Kind::kGatheredParameters, 120);
  accounting.add(Kind::kGatheredParameters, 10);
  EXPECT_EQ(accounting.stats().gathered_parameters.live, 40);
  EXPECT_EQ(accounting.stats().gathered_parameters.peak, 150);
}

TEST(Accounting, TheTotalsPeakIsThePeakOfTheSum) {
  Accounting accounting;
  accounting.add(Kind::kGatheredParameters, 100);
  accounting.remove(Kind::kGatheredParameters, 100);
  accounting.add(Kind::kUnreducedGradients, 70);
  accounting.add(Kind::kCommunication, 7);
  const auto stats = accounting.stats();
  EXPECT_EQ(stats.gathered_parameters.peak, 100);
  EXPECT_EQ(stats.unreduced_gradients.peak, 70);
  EXPECT_EQ(stats.total.peak, 100);  // not 177: the kinds peaked at different moments
}

TEST(Accounting, PeaksRestartFromWhatIsLive) {
  Accounting accounting;
  accounting.add(Kind::kMainGradients, 100);
  accounting.remove(Kind::kMainGradients, 60);
  accounting.pool_grew(80);
  accounting.pool_shrank(30);
  accounting.reset_peaks();
  auto stats = accounting.stats();
  EXPECT_EQ(stats.main_gradients.peak, 40);
  EXPECT_EQ(stats.total.peak, 40);
  EXPECT_EQ(stats.slots.peak, 50);
  accounting.add(Kind::kMainGradients, 5);
  stats = accounting.stats();
  EXPECT_EQ(stats.main_gradients.peak, 45);
  EXPECT_EQ(stats.total.peak, 45);
}

TEST(Accounting, ThePoolIsNotPartOfTheTotal) {
  Accounting accounting;
  accounting.pool_grew(100);
  accounting.pool_grew(50);
  accounting.pool_shrank(100);
  const auto stats = accounting.stats();
  EXPECT_EQ(stats.total.live, 0);
  EXPECT_EQ(stats.slots.live, 50);
  EXPECT_EQ(stats.slots.peak, 150);
  EXPECT_EQ(stats.slot_allocations, 2);  // giving back is not an allocation
}

}  // namespace accounting_test
}  // namespace fsdp::memory
