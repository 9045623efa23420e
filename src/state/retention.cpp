#include "state/retention.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "checkpoint/commit.h"
#include "checkpoint/places.h"
#include "checkpoint/steps.h"
#include "fsdp/error.h"
#include "fsdp/save_load.h"
#include "state/snapshot.h"
#include "state/source.h"

namespace fsdp::state {
namespace {

/// Returns the metric of a step; nothing if it has none.
std::optional<double> metric_of(const ckpt::Step& step) {
  if (step.state != ckpt::Step::State::kComplete) return std::nullopt;
  try {
    const auto source = open_source(step.path.string());
    if (!source->has(kMetric)) return std::nullopt;
    const auto value = source->read_object(kMetric);
    const auto* metric = std::get_if<double>(&value.value);
    return metric == nullptr || std::isnan(*metric) ? std::nullopt : std::optional(*metric);
  } catch (const ckpt::DamageError&) {
    return std::nullopt;  // It can't be loaded, so it is not the best.
  } catch (const Error&) {
    if (ckpt::is_there(step.path / ckpt::kSidecar)) throw;
    return std::nullopt;  // Another process has removed it just now.
  }
}

/// Returns the steps that have a metric, the least one first, and among equal ones the newest first.
std::vector<std::filesystem::path> best_first(const std::vector<ckpt::Step>& steps) {
  std::vector<std::pair<double, const ckpt::Step*>> ordered;
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    if (const auto metric = metric_of(*step)) ordered.emplace_back(*metric, &*step);
  }
  std::stable_sort(ordered.begin(), ordered.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<std::filesystem::path> paths;
  paths.reserve(ordered.size());
  for (const auto& [metric, step] : ordered) paths.push_back(step->path);
  return paths;
}

}  // namespace

void check_retention(const SaveOptions& options) {
  const auto require = [](bool holds, const char* name, std::int64_t value, const char* way_out) {
    if (!holds) throw Error(std::string(name) + " is " + std::to_string(value) + "; " + way_out);
  };
  require(options.keep_last >= 0, "keep_last", options.keep_last, "give 0 (all are kept) or more");
  for (const auto& [name, value] :
       {std::pair<const char*, std::int64_t>{"keep_every", options.keep_every}, {"keep_best", options.keep_best}}) {
    require(value >= 0, name, value, "give 0 (none is kept for that reason) or more");
    require(value == 0 || options.keep_last > 0, name, value, "it keeps checkpoints in addition to the last ones: give keep_last, too");
  }
}

std::vector<std::filesystem::path> steps_that_stay(const SaveOptions& options, const std::vector<ckpt::Step>& steps) {
  std::vector<std::filesystem::path> stay;
  for (const auto& step : steps) {
    if (options.keep_every > 0 && step.name.number.is_multiple_of(static_cast<std::uint64_t>(options.keep_every)))
      stay.push_back(step.path);
  }
  if (options.keep_best == 0) return stay;
  auto best = best_first(steps);
  best.resize(std::min(best.size(), static_cast<std::size_t>(options.keep_best)));
  stay.insert(stay.end(), best.begin(), best.end());
  return stay;
}

}  // namespace fsdp::state

namespace fsdp {

std::optional<std::string> best(const std::string& folder) {
  ckpt::require_folder_of_steps(folder);
  const auto found = state::best_first(ckpt::find_steps(folder));
  return found.empty() ? std::nullopt : std::optional(found.front().string());
}

}  // namespace fsdp
