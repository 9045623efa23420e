#include "fsdp/goodput.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <utility>

#include "fsdp/error.h"

namespace fsdp {
namespace {

constexpr std::int64_t kMostFailures = 1'000'000;

void check(const FailureOptions& options) {
  if (!(options.between_failures > 0) || !(options.interval > 0) || !(options.training > 0)) {
    throw Error("simulate_failures(): between_failures, interval and training must be positive");
  }
  if (!(options.checkpoint >= 0) || !(options.restart >= 0)) throw Error("simulate_failures(): checkpoint and restart can't be negative");
}

}  // namespace

Goodput simulate_failures(const FailureOptions& options) {
  check(options);
  std::mt19937_64 random(options.seed);
  std::exponential_distribution<double> until_failure(1 / options.between_failures);
  Goodput goodput;
  double next_failure = until_failure(random);
  double done = 0;  // training that the last checkpoint holds
  const auto passes = [&](double seconds) {
    if (goodput.seconds + seconds > next_failure) return false;
    goodput.seconds += seconds;
    return true;
  };
  // Returns how long it took until the failure.
  const auto fail = [&] {
    const double since = next_failure - std::exchange(goodput.seconds, next_failure);
    next_failure += until_failure(random);
    if (++goodput.failures > kMostFailures) {
      throw Error("simulate_failures(): after a million failures, " + std::to_string(done) + " of " + std::to_string(options.training) +
                  " s of training were done; save checkpoints more often, or make them shorter");
    }
    return since;
  };
  while (done < options.training) {
    const double piece = std::min(options.interval, options.training - done);
    const double checkpoint = done + piece < options.training ? options.checkpoint : 0;
    if (passes(piece + checkpoint)) {
      done += piece;
      goodput.checkpoints += checkpoint;
      continue;
    }
    goodput.lost += fail();
    while (!passes(options.restart)) goodput.restarts += fail();
    goodput.restarts += options.restart;
  }
  goodput.fraction = options.training / goodput.seconds;
  return goodput;
}

double best_checkpoint_interval(double between_failures, double checkpoint) {
  if (!(between_failures > 0) || !(checkpoint > 0)) {
    throw Error("best_checkpoint_interval(): both times must be positive");
  }
  if (checkpoint >= 2 * between_failures) return between_failures;
  const double ratio = checkpoint / (2 * between_failures);
  return std::sqrt(2 * checkpoint * between_failures) * (1 + std::sqrt(ratio) / 3 + ratio / 9) - checkpoint;
}

}  // namespace fsdp
