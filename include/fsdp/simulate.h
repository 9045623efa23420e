#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "fsdp/plan.h"

namespace fsdp {

/// How fast a collective is over one dimension of a mesh: latency_us, and the time that a rank's bytes take.
struct LinkRate {
  double latency_us = 0;   ///< Of each collective.
  double bytes_per_s = 0;  ///< What a rank sends in a second. 0: any number of bytes takes no time.
};

/// How long a rank computes for one unit in a step.
struct UnitTime {
  double forward_ms = 0;   ///< In forward.
  double backward_ms = 0;  ///< With what is computed again.
};

/// What simulate() assumes of ranks and links.
struct SimulationOptions {
  std::map<std::string, UnitTime> units = {};      ///< By the names of Plan::units. Not in here: no time.
  std::map<std::string, LinkRate> links = {};      ///< By the names of Plan::links. Not in here: no time.
  double update_ms = 0;                            ///< Of the optimizer.
  std::int64_t steps = 3;                          ///< How many are simulated.
  std::map<std::int64_t, double> slow_ranks = {};  ///< Factors of the time that ranks compute, by global rank.
  double jitter = 0;       ///< Each computation takes a time drawn from a log-normal distribution, with this deviation of its logarithm.
  std::uint64_t seed = 0;  ///< Of what is drawn.
  /// Milliseconds that a rank computes longer: (rank, step, unit, in backward). Empty: none.
  std::function<double(std::int64_t rank, std::int64_t step, std::size_t unit, bool in_backward)> delay_ms = {};
};

/// What simulate() found. Times are those of a step.
struct Simulation {
  std::vector<double> step_ms;  ///< Of each step, from the end of the one before to its own end, on the rank that ends last.
  double compute_ms = 0;        ///< The average over ranks and steps of what they compute.
  double exposed_ms = 0;        ///< The average over ranks and steps of what they wait.
  std::map<std::string, double> exposed_by_unit_ms;  ///< The same by the unit whose parameters or gradients a rank waits for.

  /// The average of step_ms.
  double average_ms() const;
};

/// Simulates steps of a plan on all of its ranks. Every rank does what the planned one does, in the same order: it computes, begins
/// collectives, and waits for them. A collective begins when all ranks of its row have come to it, and its communicator has ended those
/// before it; all ranks of the row have its result at the same time. A wait ends then. Host time, the sharing of a link by several
/// communicators, and memory that is not free yet are not simulated.
///
/// As the times of units and links are given, times are as good as these: measure them on your machine, or use the simulation to compare.
/// Takes about a nanosecond for each rank, action and step. Throws Error if `units` or `links` have a name that the plan does not have, a
/// time is negative or not finite, no time is given, or a rank does not exist.
Simulation simulate(const Plan& plan, const SimulationOptions& options);

}  // namespace fsdp
