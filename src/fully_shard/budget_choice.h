#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "engine/memory_choice.h"
#include "fsdp/fully_shard.h"
#include "plan/budget.h"
#include "plan/planned_model.h"
#include "shard/model_draft.h"

namespace fsdp {

/// A model with a memory budget, and the budget's choice.
class BudgetedModel final : public engine::MemoryChoice {
 public:
  /// Makes the choices of options.memory_budget, for a model that all ranks have drafted alike. Collective over a tensor-parallel mesh
  /// only. Throws Error on every rank if nothing fits.
  BudgetedModel(const torch::nn::Module& module, const shard::ModelDraft& draft, const FullyShardOptions& options);

  const planning::Choice& choice() const { return chosen_.choice; }
  const std::string& explanation() const { return chosen_.explanation; }
  std::vector<std::string> names() const { return model_.names(); }

  /// Sets the choice on the engine's units. Their settings are those of the choice.
  void apply_to(engine::Engine& engine);
  /// Call it when a forward begins. Chooses again if a step needs more than before, because of settings that units have now, or because
  /// backwards add to gradients of earlier ones. Throws Error if nothing fits; nothing has changed then.
  void reconsider(engine::Engine& engine, bool gradients_add_up);
  /// See adjust_memory_budget. `activations` are those of `names`. A rank that can't provide them gives the reason in `refusal`.
  void adjust(engine::Engine& engine, const std::vector<std::string>& names, std::vector<std::int64_t> activations,
              const std::string& refusal);

 private:
  using Planner = std::function<planning::PlannedModel(const FullyShardOptions& options)>;

  /// `options`: the model's; `redrafts`: whether `planned_with` makes the units again.
  planning::Chosen choose(const planning::PlannedModel& model, const planning::Choice& given, bool may_offload,
                          const FullyShardOptions& options, bool redrafts, const Planner& planned_with) const;
  void choose_again(engine::Engine& engine, planning::PlannedModel model);
  std::vector<std::int64_t> largest(std::vector<std::int64_t> numbers) const;

  MemoryBudget budget_;
  DeviceMesh tensor_parallel_;  ///< Undefined if no parameter is a tensor-parallel piece.
  planning::PlannedModel model_;
  planning::Chosen chosen_;
};

}  // namespace fsdp
