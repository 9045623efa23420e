#pragma once

#include <cstdint>

namespace fsdp {

/// A long training run that saves checkpoints and sometimes fails. All times are in seconds.
struct FailureOptions {
  double between_failures = 0;  ///< The average time between failures of any rank: that of one rank divided by the number of ranks.
  double checkpoint = 0;        ///< How long a checkpoint interrupts training.
  double restart = 0;           ///< From a failure to the first step after it.
  double interval = 0;          ///< The time of training between two checkpoints.
  double training = 0;          ///< The training to do, without interruptions.
  std::uint64_t seed = 0;       ///< The seed of the random failures.
};

/// How the time of such a run was spent.
struct Goodput {
  double seconds = 0;         ///< From the beginning to the end.
  std::int64_t failures = 0;  ///< The number of failures.
  double fraction = 0;        ///< The fraction of the time that was useful training.
  double checkpoints = 0;     ///< Seconds of checkpoints that were saved.
  double lost = 0;            ///< Seconds of training and of checkpoints that failures undid.
  double restarts = 0;        ///< Seconds of restarts, failed ones included.
};

/// Simulates the run. Failures are independent of each other, and also happen during checkpoints and restarts. After each, training resumes
/// from the last saved checkpoint. Throws Error unless between_failures, interval and training are positive, and the others not negative;
/// and if the run would not end within a million failures.
Goodput simulate_failures(const FailureOptions& options);

/// Returns the interval between checkpoints, in seconds, for which training takes the shortest time (J. T. Daly, "A higher order estimate
/// of the optimum checkpoint interval for restart dumps", 2006). Throws Error unless both are positive.
double best_checkpoint_interval(double between_failures, double checkpoint);

}  // namespace fsdp
