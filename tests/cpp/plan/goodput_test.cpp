#include "fsdp/goodput.h"

#include <gtest/gtest.h>

#include <cmath>

#include "fsdp/error.h"
#include "support/messages.h"

namespace goodput_test {

using fsdp::best_checkpoint_interval;
using fsdp::FailureOptions;
using fsdp::simulate_failures;

constexpr double kHour = 3600;

/// The expected time of a run by J. T. Daly's complete model: failures are a Poisson process, also in checkpoints and restarts.
double expected_seconds(const FailureOptions& options) {
  const double mean = options.between_failures;
  return mean * std::exp(options.restart / mean) * (std::exp((options.interval + options.checkpoint) / mean) - 1) * options.training /
         options.interval;
}

TEST(Goodput, TimeIsThatOfDalysModel) {
  for (const double between : {3 * kHour, 24 * kHour}) {
    for (const double interval : {600.0, 1800.0, 3 * kHour}) {
      const FailureOptions options{
          .between_failures = between, .checkpoint = 60, .restart = 300, .interval = interval, .training = 4000 * between, .seed = 3};
      const auto goodput = simulate_failures(options);
      EXPECT_NEAR(goodput.seconds / expected_seconds(options), 1, 0.01) << between << " " << interval;
      EXPECT_NEAR(goodput.seconds, options.training + goodput.checkpoints + goodput.lost + goodput.restarts, 1e-6 * goodput.seconds);
      EXPECT_DOUBLE_EQ(goodput.fraction, options.training / goodput.seconds);
      EXPECT_NEAR(static_cast<double>(goodput.failures) * between / goodput.seconds, 1, 0.05);
    }
  }
}

// Young's interval, the square root of twice the product, is near Daly's where a checkpoint is short beside the time between failures.
TEST(Goodput, BestIntervalIsDalysAndNearYoungs) {
  for (const double checkpoint : {1.0, 10.0}) {
    const double young = std::sqrt(2 * checkpoint * 24 * kHour);
    EXPECT_NEAR(best_checkpoint_interval(24 * kHour, checkpoint) / young, 1, 0.01) << checkpoint;
  }
  EXPECT_EQ(best_checkpoint_interval(100, 200), 100);
}

TEST(Goodput, NoIntervalIsBetterThanTheBest) {
  FailureOptions options{
      .between_failures = 3 * kHour, .checkpoint = 60, .restart = 300, .interval = 0, .training = 20'000 * kHour, .seed = 4};
  const double best = best_checkpoint_interval(options.between_failures, options.checkpoint);
  options.interval = best;
  const double fraction = simulate_failures(options).fraction;
  for (const double factor : {0.25, 0.5, 2.0, 4.0}) {
    options.interval = factor * best;
    EXPECT_LT(simulate_failures(options).fraction, fraction) << factor;
    EXPECT_GT(expected_seconds(options), expected_seconds({.between_failures = options.between_failures,
                                                           .checkpoint = options.checkpoint,
                                                           .restart = options.restart,
                                                           .interval = best,
                                                           .training = options.training}));
  }
}

TEST(Goodput, RunWithoutFailuresLosesOnlyItsCheckpoints) {
  const auto goodput = simulate_failures({.between_failures = 1e12, .checkpoint = 10, .restart = 100, .interval = 100, .training = 1000});
  EXPECT_EQ(goodput.failures, 0);
  EXPECT_DOUBLE_EQ(goodput.seconds, 1090);  // nothing is saved at the end
  EXPECT_DOUBLE_EQ(goodput.checkpoints, 90);
  EXPECT_DOUBLE_EQ(goodput.lost + goodput.restarts, 0);
}

TEST(Goodput, RunThatNeverEndsIsAnError) {
  const FailureOptions options{.between_failures = 60, .checkpoint = 10, .restart = 1, .interval = 10 * kHour, .training = 100 * kHour};
  EXPECT_NE(fsdp::testing::message_of<fsdp::Error>([&] { simulate_failures(options); }).find("save checkpoints more often"),
            std::string::npos);
}

TEST(Goodput, BadOptionsAreErrors) {
  EXPECT_THROW(simulate_failures({.between_failures = 0, .interval = 1, .training = 1}), fsdp::Error);
  EXPECT_THROW(simulate_failures({.between_failures = 1, .interval = 0, .training = 1}), fsdp::Error);
  EXPECT_THROW(simulate_failures({.between_failures = 1, .interval = 1, .training = -1}), fsdp::Error);
  EXPECT_THROW(simulate_failures({.between_failures = 1, .checkpoint = -1, .interval = 1, .training = 1}), fsdp::Error);
  EXPECT_THROW(best_checkpoint_interval(0, 1), fsdp::Error);
  EXPECT_THROW(best_checkpoint_interval(1, 0), fsdp::Error);
}

}  // namespace goodput_test
