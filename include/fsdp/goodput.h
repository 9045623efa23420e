#pragma once

#include <cstdint>

namespace fsdp {

/// A long training run that saves checkpoints and sometimes fails. All times are in seconds.
struct FailureOptions {
  double between_failures = 0;  ///< The average time from one failure of the whole world to the next; a rank's divided by the ranks.
  double checkpoint = 0;        ///< For how long a checkpoint keeps training from going on.
  double restart = 0;           ///< From a failure to the first step after it.
  double interval = 0;          ///< Of training between two checkpoints.
  double training = 0;          ///< How much training is to be done.
  std::uint64_t seed = 0;       ///< Of the failures that are drawn.
};

/// What became of the time of such a run.
struct Goodput {
  double seconds = 0;         ///< From the beginning to the end.
  std::int64_t failures = 0;  ///< How many there were.
  double fraction = 0;        ///< The part of the time in which training that lasted was done.
  double checkpoints = 0;     ///< Seconds of checkpoints that were saved.
  double lost = 0;            ///< Seconds of training and of checkpoints that failures undid.
  double restarts = 0;        ///< Seconds of restarts, failed ones included.
};

/// Simulates the run. Failures come independently of each other, in checkpoints and restarts, too; each goes back to the last checkpoint
/// that was saved. Throws Error unless between_failures, interval and training are positive, and the others not negative; and if the run
/// would not come to its end within a million failures.
Goodput simulate_failures(const FailureOptions& options);

/// Returns the interval between checkpoints, in seconds, for which training takes the shortest time (J. T. Daly, "A higher order estimate
/// of the optimum checkpoint interval for restart dumps", 2006). Throws Error unless both are positive.
double best_checkpoint_interval(double between_failures, double checkpoint);

}  // namespace fsdp
