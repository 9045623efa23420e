#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/fully_shard.h"
#include "fsdp/memory_budget.h"
#include "fsdp/plan.h"
#include "plan/budget.h"
#include "plan/planned_step.h"
#include "plan/seen_settings.h"
#include "shard/model_draft.h"

namespace fsdp::planning {

/// A C++ model on a planned mesh, without its tensors. It can be planned many times, with different choices.
class PlannedModel {
 public:
  /// Drafts the model; `options.memory_budget` is ignored. `recomputable`: see MemoryBudget. Throws the same errors as fsdp::plan().
  PlannedModel(const torch::nn::Module& module, FullyShardOptions options, PlanOptions planned,
               const std::map<std::string, std::int64_t>& recomputable = {});

  /// Plans with the options as they were given.
  Plan plan() const;
  /// Plans with a choice, which replaces these options.
  Observed observe(const Choice& choice) const;

  /// The options as they were given.
  Choice given() const;
  /// By unit: whether its forward may be repeated.
  std::vector<bool> recomputable() const;
  /// The units' names, as in UnitInfo.
  std::vector<std::string> names() const;
  /// From now on, these are the activations. Throws Error for names of no unit.
  void set_activations(const std::map<std::string, std::int64_t>& by_name);
  /// From now on, units have these settings in all backwards of a step but the last.
  void set_settings(SeenSettings settings) { settings_ = std::move(settings); }
  const SeenSettings& settings() const { return settings_; }
  /// How gradients add up: see Budget.
  std::string accumulation() const;
  /// From now on, all backwards of a step reduce their gradients.
  void synchronize();
  /// The options without their functions. Only options that do not affect how units are made may change: placements, reshard_after_forward,
  /// offload.
  FullyShardOptions& options() { return options_; }

 private:
  struct Steps;
  Steps make(const Choice& choice) const;
  Microbatches microbatches() const { return settings_.microbatches({.count = planned_.microbatches}); }
  std::vector<std::int64_t> by_unit(const std::map<std::string, std::int64_t>& by_name, const std::string& what) const;

  FullyShardOptions options_;
  PlanOptions planned_;
  SeenSettings settings_;
  shard::ModelDraft draft_;
  Passes passes_;
  std::vector<std::int64_t> activations_;
  std::vector<std::int64_t> kept_if_recomputed_;  ///< By unit, or kNeverRecomputed.
};

}  // namespace fsdp::planning
