#include "report/plan_comparison.h"

#include <algorithm>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <utility>

#include "fsdp/error.h"

namespace fsdp::report {
namespace {

constexpr double kNsPerMillisecond = 1e6;

/// The name of a kind in a plan: "main_parameters".
std::string key_of(std::string_view kind) {
  std::string key(kind);
  std::ranges::replace(key, ' ', '_');
  return key;
}

/// The steps that have all compared values, in order.
std::vector<const StepSpan*> measured_steps(const RankTimeline& rank) {
  std::vector<const StepSpan*> steps;
  for (const auto& step : rank.steps) {
    if (step.is_whole && step.sent >= 0) steps.push_back(&step);
  }
  return steps;
}

double middle_ms(std::vector<const StepSpan*> steps) {
  const auto length = [](const StepSpan* step) { return step->ended - step->began; };
  std::ranges::sort(steps, {}, length);
  return static_cast<double>(length(steps[steps.size() / 2])) / kNsPerMillisecond;
}

/// The measured values of a rank, from its steps.
using Measure = std::function<double(const std::vector<const StepSpan*>& steps)>;

}  // namespace

PlannedStep read_plan(const std::filesystem::path& file) {
  const auto fail = [&](const std::string& why) -> Error {
    return Error("--plan " + file.string() + ": " + why + "; `fsdp plan --json` prints a plan, and Plan::json() returns one");
  };
  std::ifstream stream(file);
  if (!stream) throw fail("it can't be read");
  try {
    const auto json = nlohmann::json::parse(stream);
    PlannedStep plan;
    json.at("ranks").get_to(plan.ranks);
    const auto& memory = json.at("memory");
    memory.at("total").at("peak").get_to(plan.peak);
    for (std::size_t kind = 0; kind < plan.peaks.size(); ++kind)
      memory.at(key_of(events::kMemoryKinds[kind])).at("peak").get_to(plan.peaks[kind]);
    const auto& wire = json.at("wire");
    for (const char* part : {"all_gather_bytes", "reduce_scatter_bytes", "control_bytes"}) plan.sent += wire.at(part).get<std::int64_t>();
    wire.at("shared_memory_bytes").get_to(plan.read_by_peers);
    if (json.contains("time")) plan.ms = json.at("time").at("step_ms").get<double>();
    return plan;
  } catch (const nlohmann::json::exception&) {
    throw fail("it is no plan");
  }
}

PlanComparison compare(const PlannedStep& plan, const Timeline& timeline) {
  for (const auto& rank : timeline.ranks) {
    if (rank.writer.world_size < 0 || rank.writer.world_size == plan.ranks) continue;
    throw Error("--plan: the plan is for " + std::to_string(plan.ranks) + " ranks, and these events are of a run of " +
                std::to_string(rank.writer.world_size) + "; plan with as many (--ranks)");
  }
  PlanComparison comparison{.planned_peak = plan.peak, .values = {}};
  const auto add = [&](const std::string& name, bool is_time, double planned, const Measure& measure) {
    auto& value = comparison.values.emplace_back(ComparedValue{.name = name, .is_time = is_time, .planned = planned, .measured = -1});
    for (const auto& rank : timeline.ranks) {
      const auto steps = measured_steps(rank);
      if (steps.empty()) continue;
      if (const auto of_rank = measure(steps); of_rank > value.measured) {
        value.measured = of_rank;
        value.rank = rank.writer.rank;
      }
    }
  };
  const auto add_bytes = [&](const std::string& name, std::int64_t planned, const std::function<std::int64_t(const StepSpan&)>& of_step) {
    add(name, false, static_cast<double>(planned),
        [&](const std::vector<const StepSpan*>& steps) { return static_cast<double>(of_step(*steps.back())); });
  };
  for (std::size_t kind = 0; kind < plan.peaks.size(); ++kind) {
    add_bytes(std::string(events::kMemoryKinds[kind]), plan.peaks[kind], [kind](const StepSpan& step) { return step.peaks[kind]; });
  }
  add_bytes("all kinds together", plan.peak, [](const StepSpan& step) { return step.peak; });
  add_bytes("sent as messages", plan.sent - plan.read_by_peers, [](const StepSpan& step) { return step.sent - step.read_by_peers; });
  add_bytes("read by peers of its host", plan.read_by_peers, [](const StepSpan& step) { return step.read_by_peers; });
  add("time of a step", true, plan.ms.value_or(-1), middle_ms);
  return comparison;
}

}  // namespace fsdp::report
