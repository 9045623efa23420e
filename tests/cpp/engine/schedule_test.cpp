#include "engine/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace fsdp::engine {
namespace schedule_test {

using Units = std::vector<std::size_t>;

void run(Schedule& schedule, Pass pass, const Units& order) {
  schedule.begin(pass);
  for (const auto unit : order) schedule.move_to(unit);
}

/// How many moves of a pass were among the `depth` units that the moves before them (and the begin) predicted.
int predicted(Schedule& schedule, Pass pass, const Units& order, int depth = 1) {
  schedule.begin(pass);
  int hits = 0;
  for (const auto unit : order) {
    const auto expected = schedule.next(depth);
    hits += std::find(expected.begin(), expected.end(), unit) != expected.end();
    schedule.move_to(unit);
  }
  return hits;
}

TEST(Schedule, KnowsNothingAtFirst) {
  Schedule schedule;
  EXPECT_EQ(schedule.next(3), Units{});
  EXPECT_EQ(predicted(schedule, Pass::kForward, {0, 1, 2}), 0);
}

TEST(Schedule, PredictsTheSecondPassFromTheFirst) {
  Schedule schedule;
  run(schedule, Pass::kForward, {0, 1, 2, 3});
  schedule.begin(Pass::kBackward);
  schedule.begin(Pass::kForward);
  EXPECT_EQ(schedule.next(1), Units{0});  // before the first move
  schedule.move_to(0);
  EXPECT_EQ(schedule.next(0), Units{});
  EXPECT_EQ(schedule.next(1), Units{1});
  EXPECT_EQ(schedule.next(2), (Units{1, 2}));  // nearest first
  EXPECT_EQ(schedule.next(9), (Units{1, 2, 3}));
  schedule.move_to(1);
  schedule.move_to(2);
  EXPECT_EQ(schedule.next(9), Units{3});
  schedule.move_to(3);
  EXPECT_EQ(schedule.next(9), Units{});  // the pass ended here
}

TEST(Schedule, ForwardAndBackwardAreApart) {
  Schedule schedule;
  for (int step = 0; step < 2; ++step) {
    run(schedule, Pass::kForward, {0, 1, 2});
    run(schedule, Pass::kBackward, {2, 1, 0});
  }
  schedule.begin(Pass::kForward);
  EXPECT_EQ(schedule.pass(), Pass::kForward);
  schedule.move_to(1);
  EXPECT_EQ(schedule.next(1), Units{});  // no pass began with 1
  EXPECT_EQ(predicted(schedule, Pass::kForward, {0, 1, 2}), 2) << "the pass before began with 1, and heals here";
  EXPECT_EQ(predicted(schedule, Pass::kBackward, {2, 1, 0}), 3);
  EXPECT_EQ(predicted(schedule, Pass::kForward, {0, 1, 2}), 3);
}

TEST(Schedule, AUnitUsedInSeveralPlacesIsPredictedByWhatCameBefore) {
  Schedule schedule;
  const Units order = {0, 1, 0, 2, 0, 3};
  run(schedule, Pass::kForward, order);
  EXPECT_EQ(predicted(schedule, Pass::kForward, order), 6);
}

TEST(Schedule, TheUnitItselfAndRepetitionsAreNotPredicted) {
  Schedule schedule;
  run(schedule, Pass::kForward, {0, 1, 0, 1, 0, 2});
  schedule.begin(Pass::kForward);
  schedule.move_to(0);
  const auto expected = schedule.next(9);
  ASSERT_FALSE(expected.empty());
  EXPECT_EQ(expected.front(), 1U);
  EXPECT_LE(expected.size(), 2U);  // 1 and 2, each once, never 0
  for (const auto unit : expected) EXPECT_NE(unit, 0U);
}

TEST(Schedule, AnEndlessCycleEnds) {
  Schedule schedule;
  Units order;
  for (int i = 0; i < 10; ++i) order.insert(order.end(), {0, 1, 2});
  run(schedule, Pass::kForward, order);
  EXPECT_EQ(schedule.next(9), (Units{0, 1}));
}

TEST(Schedule, ASkippedUnitCostsItsSurroundingsOnly) {
  Schedule schedule;
  const Units all = {0, 1, 2, 3, 4, 5, 6, 7};
  run(schedule, Pass::kForward, all);
  ASSERT_EQ(predicted(schedule, Pass::kForward, all), 8);
  // 4 after 2 is new, and so is what comes after the pair (2, 4).
  EXPECT_EQ(predicted(schedule, Pass::kForward, {0, 1, 2, 4, 5, 6, 7}), 5);
  // Back again: what follows (1, 2) has to be learned once more, nothing else was forgotten.
  EXPECT_EQ(predicted(schedule, Pass::kForward, all), 7);
  EXPECT_EQ(predicted(schedule, Pass::kForward, all), 8);
}

TEST(Schedule, PassesWithoutBackwardHeal) {
  Schedule schedule;
  const Units order = {0, 1, 2, 3};
  const auto train = [&] {
    const int hits = predicted(schedule, Pass::kForward, order);
    return hits + predicted(schedule, Pass::kBackward, {3, 2, 1, 0});
  };
  train();
  ASSERT_EQ(train(), 8);
  // Validation passes follow each other without a begin.
  schedule.begin(Pass::kForward);
  for (int pass = 0; pass < 3; ++pass) {
    for (const auto unit : order) schedule.move_to(unit);
  }
  EXPECT_EQ(schedule.next(1), Units{0});
  EXPECT_GE(train(), 7);
  EXPECT_EQ(train(), 8);
}

TEST(Schedule, AChangedOrderIsLearnedInOnePass) {
  Schedule schedule;
  run(schedule, Pass::kForward, {0, 1, 2, 3, 4});
  run(schedule, Pass::kForward, {4, 2, 0, 3, 1});
  EXPECT_EQ(predicted(schedule, Pass::kForward, {4, 2, 0, 3, 1}), 5);
}

TEST(Schedule, AShorterPassEndsWhereItEnds) {
  Schedule schedule;
  run(schedule, Pass::kForward, {0, 1, 2, 3});
  run(schedule, Pass::kForward, {0, 1});
  schedule.begin(Pass::kForward);
  schedule.move_to(0);
  EXPECT_EQ(schedule.next(9), Units{1});  // nothing is read ahead for units that the last pass did not use
}

}  // namespace schedule_test
}  // namespace fsdp::engine
