#include "fully_shard/budget_choice.h"

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "comm/mesh/ranks.h"
#include "fsdp/error.h"
#include "fsdp/plan.h"
#include "plan/planned_mesh.h"

namespace fsdp {
namespace {

using planning::Choice;
using planning::Remedy;

/// The options of a plan: those of the model, on planned meshes.
FullyShardOptions on_planned_meshes(const FullyShardOptions& options) {
  const auto twins = std::make_shared<planning::PlannedMeshes>(options.separate_reduce_group, options.reshard_after_forward_size);
  auto planned = options;
  planned.mesh = twins->of(options.mesh);
  if (options.unit_settings) {
    planned.unit_settings = [twins, given = options.unit_settings](const std::string& name, const torch::nn::Module& module) {
      auto settings = given(name, module);
      if (settings.mesh.defined()) settings.mesh = twins->of(settings.mesh);
      return settings;
    };
  }
  if (options.tensor_parallel) {
    planned.tensor_parallel = [twins, given = options.tensor_parallel](const std::string& name, const at::Tensor& parameter) {
      auto piece = given(name, parameter);
      if (piece) piece->mesh = twins->of(piece->mesh);
      return piece;
    };
  }
  return planned;
}

/// What may help where nothing fits, the cheapest first. `redrafts`: whether units can be made anew for it.
std::vector<Remedy> remedies_for(const FullyShardOptions& options, const std::function<std::int64_t(const FullyShardOptions&)>& bytes,
                                 bool redrafts) {
  std::vector<Remedy> remedies;
  const auto add = [&](std::string option, const std::function<void(FullyShardOptions&)>& change) {
    remedies.push_back({.option = std::move(option), .bytes = [=] {
                          auto changed = options;
                          change(changed);
                          return bytes(changed);
                        }});
  };
  const auto sharded = Placements::optim_grads_params();
  if (!options.reshard_after_forward) add("reshard_after_forward = true", [](auto& changed) { changed.reshard_after_forward = true; });
  if (options.placements != sharded) add("placements optim_grads_params", [=](auto& changed) { changed.placements = sharded; });
  if (redrafts && (!options.mixed_precision || !options.mixed_precision->param_dtype)) {
    add("mixed_precision with param_dtype at::kBFloat16", [](auto& changed) {
      if (!changed.mixed_precision) changed.mixed_precision = MixedPrecisionPolicy();
      changed.mixed_precision->param_dtype = at::kBFloat16;
    });
  }
  if (options.offload != Offload::kAll) add("offload = Offload::kAll", [](auto& changed) { changed.offload = Offload::kAll; });
  if (!redrafts || options.unit_settings || options.tensor_parallel) return remedies;  // on meshes that can't be made larger here
  for (const auto& mesh : planning::larger_meshes(options.mesh)) {
    add(std::to_string(mesh.size()) + " ranks", [mesh](auto& changed) { changed.mesh = mesh; });
  }
  return remedies;
}

}  // namespace

BudgetedModel::BudgetedModel(const torch::nn::Module& module, const shard::ModelDraft& draft, const FullyShardOptions& options)
    : budget_(*options.memory_budget),
      tensor_parallel_(draft.tensor_parallel),
      model_(module, on_planned_meshes(options), budget_.planned, budget_.recomputable) {
  const auto planned_with = [&](const FullyShardOptions& changed) {
    return planning::PlannedModel(module, changed, budget_.planned, budget_.recomputable);
  };
  chosen_ = choose(model_, model_.given(), options.offload == Offload::kNone, on_planned_meshes(options), /*redrafts=*/true, planned_with);
}

void BudgetedModel::apply_to(engine::Engine& engine) {
  const auto has = [](const std::vector<bool>& units, std::size_t k) { return !units.empty() && units[k]; };
  for (const auto& unit : engine.units()) {
    unit->options.kept_by_budget = has(chosen_.choice.kept, unit->place.index);
    unit->options.recomputes = has(chosen_.choice.recomputed, unit->place.index);
  }
  if (auto grown = model_.settings().grown(engine.units(), false)) model_.set_settings(*std::move(grown));
}

void BudgetedModel::reconsider(engine::Engine& engine, bool gradients_add_up) {
  auto grown = model_.settings().grown(engine.units(), gradients_add_up);
  if (!grown) return;
  auto model = model_;
  model.set_settings(*std::move(grown));
  choose_again(engine, std::move(model));
}

void BudgetedModel::choose_again(engine::Engine& engine, planning::PlannedModel model) {
  auto given = model.given();
  given.offloads_optimizer_state = chosen_.choice.offloads_optimizer_state;
  const auto planned_with = [&](const FullyShardOptions& changed) {
    auto other = model;
    other.options() = changed;
    return other;
  };
  chosen_ = choose(model, given, /*may_offload=*/false, model.options(), /*redrafts=*/false, planned_with);
  model_ = std::move(model);
  engine.set({.prefetch_depth = chosen_.choice.prefetch_depth});
  apply_to(engine);
}

void BudgetedModel::adjust(engine::Engine& engine, const std::vector<std::string>& names, std::vector<std::int64_t> activations,
                           const std::string& refusal) {
  activations.push_back(refusal.empty() ? 0 : 1);
  const auto all = comm::Ranks(engine.options().mesh)
                       .exchange(at::tensor(activations, at::kLong), {.operation = "adjust_memory_budget", .unit = "(model)"})
                       .amax(0);
  std::copy_n(all.const_data_ptr<std::int64_t>(), activations.size(), activations.begin());
  activations = largest(std::move(activations));
  if (!refusal.empty()) throw Error(refusal);
  if (activations.back() != 0) {
    throw Error("adjust_memory_budget(): another rank refuses the activations that it was given; see its error");
  }
  std::map<std::string, std::int64_t> by_name;
  for (std::size_t k = 0; k < names.size(); ++k) by_name[names[k]] = activations[k];
  auto model = model_;
  model.set_activations(by_name);
  choose_again(engine, std::move(model));
}

planning::Chosen BudgetedModel::choose(const planning::PlannedModel& model, const Choice& given, bool may_offload,
                                       const FullyShardOptions& options, bool redrafts, const Planner& planned_with) const {
  planning::Budget budget{.bytes = budget_.bytes,
                          .given = given,
                          .recomputable = model.recomputable(),
                          .may_offload = may_offload,
                          .offload_option = "offload = Offload::kOptimizerState",
                          .accumulation = model.accumulation(),
                          .observe = [&](const Choice& choice) { return model.observe(choice); }};
  if (tensor_parallel_.defined()) budget.largest = [this](auto numbers) { return largest(std::move(numbers)); };
  auto chosen = planning::choose(budget);
  if (chosen.fits) return chosen;
  // With another option, the least prefetch depth may be another one. It needs least without read-ahead.
  auto least = options;
  least.prefetch_depth = 0;
  if (chosen.choice.offloads_optimizer_state) least.offload = std::max(least.offload, Offload::kOptimizerState);
  const auto bytes_with = [&](const FullyShardOptions& changed) {
    const auto other = planned_with(changed);
    auto choice = other.given();
    choice.recomputed = other.recomputable();
    return largest({other.observe(choice).most}).front();
  };
  auto remedies = remedies_for(least, bytes_with, redrafts);
  auto synchronized = model;
  synchronized.synchronize();
  if (synchronized.accumulation() != model.accumulation()) {
    remedies.insert(remedies.begin(), {.option = "gradients that each backward reduces",
                                       .bytes = [&] { return largest({synchronized.observe(chosen.choice).most}).front(); }});
  }
  throw Error(planning::too_small(budget, chosen, remedies));
}

/// Returns the largest value of each number over the ranks with other tensor-parallel pieces.
std::vector<std::int64_t> BudgetedModel::largest(std::vector<std::int64_t> numbers) const {
  if (!tensor_parallel_.defined()) return numbers;
  const comm::Label label{.operation = "memory_budget", .unit = "(model)"};
  const auto all = comm::Ranks(tensor_parallel_).exchange(at::tensor(numbers, at::kLong), label).amax(0);
  std::copy_n(all.const_data_ptr<std::int64_t>(), numbers.size(), numbers.begin());
  return numbers;
}

}  // namespace fsdp
