#include "plan_time.h"

#include <algorithm>
#include <cstdint>
#include <iomanip>
#include <map>
#include <utility>

#include "base/classic_stream.h"
#include "fsdp/error.h"
#include "plan/config_model.h"
#include "shard/unit_division.h"

namespace fsdp::tools {
namespace {

/// How long a rank computes for each unit: a multiplication and an addition in forward, and twice as many in backward.
std::map<std::string, UnitTime> unit_times(const PlanQuestion& question, const Plan& plan, const torch::nn::Module& model) {
  std::map<std::string, UnitTime> times;
  const auto tokens = static_cast<double>(question.batch * question.sequence);
  for (const auto& item : model.named_modules()) {
    const auto* module = dynamic_cast<const planning::ConfigModule*>(item.value().get());
    if (module == nullptr || module->multiplications == 0) continue;
    // Attention is causal: on average, a token looks at half of the sequence.
    const double attention = module->attention_width * static_cast<double>(question.sequence);
    const double forward_ms = 1e3 * 2 * tokens * (module->multiplications + attention) / question.flops;
    const bool is_block = dynamic_cast<const planning::ConfigLayer*>(module) != nullptr;
    const bool is_unit = std::ranges::find(plan.units, item.key(), &PlannedUnit::name) != plan.units.end();
    times[is_unit ? item.key() : shard::shown("")] = {.forward_ms = forward_ms,
                                                      .backward_ms = (is_block && question.recomputes ? 3 : 2) * forward_ms};
  }
  if (times.empty()) throw Error("--flops needs the model's config.json: shapes alone do not say how often a weight is used");
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

PlannedTime time_of(const PlanQuestion& question, const Plan& plan, const torch::nn::Module& model) {
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
