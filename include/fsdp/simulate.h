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
  double latency_us = 0;   ///< The latency of each collective.
  double bytes_per_s = 0;  ///< The bytes that a rank sends in a second. 0: sending takes no time.
};

/// How long a rank computes for one unit in a step.
struct UnitTime {
  double forward_ms = 0;   ///< In forward.
  double backward_ms = 0;  ///< In backward, with recomputation.
};

/// The times of ranks and links for simulate().
struct SimulationOptions {
  std::map<std::string, UnitTime> units = {};      ///< By the names of Plan::units. Missing units take no time.
  std::map<std::string, LinkRate> links = {};      ///< By the names of Plan::links. Missing links take no time.
  double update_ms = 0;                            ///< The time of the optimizer's update.
  std::int64_t steps = 3;                          ///< The number of simulated steps.
  std::map<std::int64_t, double> slow_ranks = {};  ///< Factors of the time that ranks compute, by global rank.
  double jitter = 0;       ///< Each computation takes a time drawn from a log-normal distribution, with this deviation of its logarithm.
  std::uint64_t seed = 0;  ///< The seed of the random numbers.
  /// Milliseconds that a rank computes longer: (rank, step, unit, in backward). Empty: none.
  std::function<double(std::int64_t rank, std::int64_t step, std::size_t unit, bool in_backward)> delay_ms = {};
};

/// The result of simulate(). Times are those of a step.
struct Simulation {
  std::vector<double> step_ms;  ///< Of each step, from the end of the previous step to its own end, on the rank that ends last.
  double compute_ms = 0;        ///< The average time of computation, over ranks and steps.
  double exposed_ms = 0;        ///< The average time of waits, over ranks and steps.
  std::map<std::string, double> exposed_by_unit_ms;  ///< exposed_ms by the unit whose parameters or gradients a rank waits for.

  /// The average of step_ms.
  double average_ms() const;
};

/// Simulates steps of a plan on all of its ranks. Every rank does the same as the planned rank, in the same order: it computes, begins
/// collectives, and waits for them. A collective begins when all ranks of its process group have called it, and the previous collectives of
/// the group have ended. All ranks of the group have the result at the same time, and stop waiting. Host time, the sharing of a link by
/// several communicators, and waits for free memory are not simulated.
///
/// The result is as accurate as the times of units and links: measure them on your machine, or use the simulation only to compare settings.
/// Takes about a nanosecond for each rank, action and step. Throws Error if `units` or `links` have a name that the plan does not have, if
/// a time is negative or not finite, if no time is set, or if a rank does not exist.
Simulation simulate(const Plan& plan, const SimulationOptions& options);

}  // namespace fsdp
