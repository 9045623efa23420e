#include "plan_time.h"

#include <algorithm>
#include <cstdint>
#include <iomanip>
#include <map>
#include <utility>

#include "base/classic_stream.h"
#include "fsdp/error.h"
#include "shard/unit_division.h"

namespace fsdp::tools {
namespace {

/// The innermost of these units around a module, or the root.
std::string unit_around(const std::string& name, const std::map<std::string, double>& units) {
  for (auto end = name.rfind('.'); end != std::string::npos && end > 0; end = name.rfind('.', end - 1)) {
    if (auto outer = name.substr(0, end); units.contains(outer)) return outer;
  }
  return shard::shown("");
}

/// How long a rank computes for each unit. Backward takes two times as long as forward.
std::map<std::string, UnitTime> unit_times(const PlanQuestion& question, const Plan& plan, const ModelShapes& model) {
  if (model.operations.empty()) {
    throw Error(
        "--flops needs the model's config.json and a Python with transformers: the number of operations cannot be computed from shapes "
        "alone");
  }
  std::map<std::string, double> own;  // Without those of units within.
  for (const auto& unit : plan.units) own[unit.name] = 0;
  for (const auto& [name, operations] : model.operations) {
    const auto unit = shard::shown(name);
    if (!own.contains(unit)) continue;  // The embedding or the head, which the root has.
    own[unit] += operations;
    if (!name.empty()) own[unit_around(name, own)] -= operations;
  }
  std::map<std::string, UnitTime> times;
  for (const auto& [unit, operations] : own) {
    const double forward_ms = 1e3 * static_cast<double>(question.batch) * std::max(operations, 0.0) / question.flops;
    const bool recomputes = question.recomputes && model.blocks.contains(unit);
    times[unit] = {.forward_ms = forward_ms, .backward_ms = (recomputes ? 3 : 2) * forward_ms};
  }
  return times;
}

Simulation simulated(const PlanQuestion& question, const Plan& plan, std::map<std::string, UnitTime> units, double slower) {
  SimulationOptions rates{.units = std::move(units)};
  for (auto& [name, time] : rates.units) time = {time.forward_ms * slower, time.backward_ms * slower};
  for (const auto& link : plan.links) {
    const auto rate = link.dim == "replicate" && question.replicate_rate != 0 ? question.replicate_rate : question.rate;
    rates.links[link.dim] = {.latency_us = question.latency_us * slower, .bytes_per_s = static_cast<double>(rate) / slower};
  }
  return simulate(plan, rates);
}

}  // namespace

PlannedTime time_of(const PlanQuestion& question, const Plan& plan, const ModelShapes& model) {
  const auto units = unit_times(question, plan, model);
  const auto middle = simulated(question, plan, units, 1);
  return {.middle = middle,
          .from_ms = simulated(question, plan, units, 1 - question.off).average_ms(),
          .to_ms = simulated(question, plan, units, 1 + question.off).average_ms(),
          .tokens_per_second = 1e3 * static_cast<double>(question.batch * question.sequence) / middle.average_ms()};
}

std::string text_of(const PlannedTime& time) {
  ClassicStream<std::ostringstream> text;
  text << std::fixed << std::setprecision(1) << "\nTime of a step, simulated from the given rates: " << time.middle.average_ms() << " ms ("
       << time.from_ms << " to " << time.to_ms << "): computation " << time.middle.compute_ms << " ms, waits " << time.middle.exposed_ms
       << " ms. Tokens per second on each rank: " << time.tokens_per_second << "\n";
  return text.str();
}

}  // namespace fsdp::tools
