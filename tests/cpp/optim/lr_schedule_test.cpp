#include "fsdp/lr_schedule.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "fsdp/error.h"
#include "support/messages.h"

namespace fsdp {
namespace lr_schedule_test {

using testing::message_of;

std::vector<double> factors(const LRSchedule& schedule, const std::vector<std::int64_t>& steps) {
  std::vector<double> values;
  for (const auto step : steps) values.push_back(schedule(step));
  return values;
}

void expect_near(const std::vector<double>& actual, const std::vector<double>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) EXPECT_NEAR(actual[i], expected[i], 1e-15) << i;
}

TEST(LRSchedule, Constant) {
  expect_near(factors(constant_schedule(), {0, 1, 1'000'000}), {1, 1, 1});
  expect_near(factors(constant_schedule(4), {0, 1, 2, 3, 4, 5}), {0.25, 0.5, 0.75, 1, 1, 1});
}

TEST(LRSchedule, Linear) {
  expect_near(factors(linear_schedule(2, 6), {0, 1, 2, 3, 4, 5, 6, 7}), {0.5, 1, 1, 0.75, 0.5, 0.25, 0, 0});
  expect_near(factors(linear_schedule(0, 4, 0.2), {0, 1, 2, 3, 4, 100}), {1, 0.8, 0.6, 0.4, 0.2, 0.2});
}

TEST(LRSchedule, Cosine) {
  const double root = std::sqrt(0.5);
  expect_near(factors(cosine_schedule(1, 5), {0, 1, 2, 3, 4, 5, 6}), {1, 1, 0.5 + 0.5 * root, 0.5, 0.5 - 0.5 * root, 0, 0});
  expect_near(factors(cosine_schedule(0, 2, 0.1), {0, 1, 2, 3}), {1, 0.55, 0.1, 0.1});
}

TEST(LRSchedule, WarmUpOnly) {
  for (const auto& make : {linear_schedule, cosine_schedule}) {
    expect_near(factors(make(3, 3, 0.5), {0, 1, 2, 3, 4}), {1.0 / 3, 2.0 / 3, 1, 0.5, 0.5});
    expect_near(factors(make(0, 0, 0.5), {0, 1}), {0.5, 0.5});
  }
}

TEST(LRSchedule, NeverRisesAfterTheWarmUp) {
  for (const auto& schedule : {linear_schedule(10, 1000, 0.1), cosine_schedule(10, 1000, 0.1)}) {
    for (std::int64_t step = 1; step < 1100; ++step) {
      if (step < 10) {
        EXPECT_GT(schedule(step), schedule(step - 1)) << step;
      }
      if (step > 10) {
        EXPECT_LE(schedule(step), schedule(step - 1)) << step;
      }
      EXPECT_GE(schedule(step), 0.1 - 1e-15) << step;
      EXPECT_LE(schedule(step), 1) << step;
    }
  }
}

TEST(LRSchedule, RefusesBadSteps) {
  for (const auto& make : {linear_schedule, cosine_schedule}) {
    EXPECT_NE(message_of([&] { make(5, 4, 0); }).find("5 warm-up steps of 4"), std::string::npos);
    EXPECT_NE(message_of([&] { make(-1, 4, 0); }).find("-1 warm-up steps"), std::string::npos);
    EXPECT_NE(message_of([&] { make(0, -1, 0); }), "no error");
    EXPECT_EQ(message_of([&] { make(4, 4, 0); }), "no error");
  }
  EXPECT_NE(message_of([] { constant_schedule(-1); }), "no error");
}

}  // namespace lr_schedule_test
}  // namespace fsdp
