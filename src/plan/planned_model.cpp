#include "plan/planned_model.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "engine/engine.h"
#include "fsdp/error.h"
#include "memory/slot_storage.h"
#include "optim/shard_optimizer.h"
#include "plan/fsdp2_memory.h"
#include "plan/unit_order.h"

namespace fsdp::planning {
namespace {

using engine::Engine;
using engine::Unit;

/// An algorithm that computes nothing, and keeps for each element what the optimizer keeps.
std::shared_ptr<optim::Algorithm> make_algorithm(const std::shared_ptr<Engine>& engine, PlannedOptimizer optimizer) {
  std::vector<optim::StateKind> kinds;
  if (optimizer == PlannedOptimizer::kSGDMomentum) kinds = {{"momentum_buffer"}};
  if (optimizer == PlannedOptimizer::kAdamW) kinds = optim::adamw(engine, {}, {})->kinds();
  const auto nothing = [](const optim::GroupSettings&, double, std::vector<optim::Segment*>&) {};
  return std::make_shared<optim::Elementwise>(engine, optim::Groups(optim::adam_defaults({}), {}, optim::adam_rules({})), std::move(kinds),
                                              nothing);
}

std::shared_ptr<Engine> make_engine(const shard::ModelDraft& draft, const FullyShardOptions& options) {
  const auto engine = std::make_shared<Engine>(engine::EngineOptions{.mesh = options.mesh,
                                                                     .tensor_parallel = draft.tensor_parallel,
                                                                     .prefetch_depth = options.prefetch_depth,
                                                                     .keep_gathered_bytes = options.keep_gathered_bytes,
                                                                     .events_source = 0});
  for (std::size_t k = 0; k < draft.plans.size(); ++k) {
    const auto& plan = draft.plans[k];
    auto [parameters, layout, formats] = draft.units[k];
    const auto communicators =
        engine::communicators_of(plan.settings.mesh, options.separate_reduce_group, options.reshard_after_forward_size);
    auto& unit = engine->add(std::make_unique<Unit>(shard::shown(plan.name), std::move(parameters), std::move(layout), std::move(formats),
                                                    shard::unit_options(plan, options, communicators), communicators,
                                                    memory::empty_storage(options.mesh.device())));
    if (plan.parent != shard::UnitPlan::kNoParent) unit.place.parent = engine->units()[plan.parent].get();
    unit.allocate_main(engine->accounting());
  }
  return engine;
}

}  // namespace

/// The engine of one plan, and what its steps do.
struct PlannedModel::Steps {
  std::shared_ptr<Engine> engine;
  std::shared_ptr<optim::Algorithm> algorithm;
  Passes passes;
  std::vector<UnitActivations> activations;
  Microbatches microbatches;

  /// Calls `use` with the steps.
  template <typename Use>
  auto with(const Use& use) const {
    const auto update = [this](Highest&) {  // as Optimizer::step()
      engine->main().flush_writes();
      engine->main().finish_gradient_sync();
      algorithm->step();
      engine->main().changed();
    };
    PlannedSteps steps(engine, passes, Trigger::kPaging, update);
    steps.set_activations(activations);
    steps.set_microbatches(microbatches);
    return use(steps);
  }
};

PlannedModel::PlannedModel(const torch::nn::Module& module, FullyShardOptions options, PlanOptions planned,
                           const std::map<std::string, std::int64_t>& recomputable)
    : options_(std::move(options)), planned_(std::move(planned)) {
  const at::NoGradGuard no_grad;
  if (!options_.mesh.defined() || !options_.mesh.device().is_meta()) {
    throw Error("plan(): options.mesh is no planned mesh; make it, and the meshes of units, by planned_device_mesh()");
  }
  if (planned_.microbatches < 1) throw Error("plan(): microbatches " + std::to_string(planned_.microbatches) + "; give 1 or more");
  shard::draft_model(module, options_, draft_);
  passes_ = module_order(module, draft_.plans);
  for (std::size_t k = 0; k < draft_.plans.size(); ++k) {
    // The model's tensors are not the plan's, which may live longer.
    draft_.plans[k].parameters.clear();
    draft_.plans[k].modules.clear();
    for (auto& parameter : draft_.units[k].parameters) parameter.tensor = engine::UnitParameter().tensor;
  }
  // Functions of the program may hold what must not live as long.
  options_.units = {};
  options_.ignore = {};
  options_.granularity = {};
  options_.gather_format = {};
  options_.unit_settings = {};
  options_.tensor_parallel = {};
  set_activations(planned_.activations);
  kept_if_recomputed_ = by_unit(recomputable, "memory_budget: recomputable names");
  for (std::size_t k = 0; k < draft_.plans.size(); ++k) {
    const auto name = shard::shown(draft_.plans[k].name);
    if (!recomputable.contains(name)) {
      kept_if_recomputed_[k] = kNeverRecomputed;
    } else if (std::ranges::any_of(draft_.plans, [k](const auto& plan) { return plan.parent == k; })) {
      throw Error("memory_budget: recomputable names unit '" + name + "', which has units within it; name those");
    }
  }
}

Plan PlannedModel::plan() const {
  const at::NoGradGuard no_grad;
  const auto steps = make(given());
  auto plan = steps.with([](auto& planned) { return planned.run(); });
  for (const auto& state : steps.algorithm->state()) {
    plan.units[state.unit->place.index].optimizer_state += static_cast<std::int64_t>(state.values.nbytes());
  }
  for (const auto& unit : steps.engine->units()) {
    auto& planned = plan.units[unit->place.index];
    planned.checkpoint += part_in_checkpoint(*unit, planned.optimizer_state);
  }
  if (planned_.microbatches > 1) return plan;
  plan.fsdp2 = fsdp2_memory({.engine = *steps.engine,
                             .passes = steps.passes,
                             .activations = activations_,
                             .optimizer_values = static_cast<std::int64_t>(steps.algorithm->kinds().size())});
  return plan;
}

Observed PlannedModel::observe(const Choice& choice) const {
  const at::NoGradGuard no_grad;
  return make(choice).with([](auto& planned) { return planned.observe(); });
}

Choice PlannedModel::given() const {
  return {.prefetch_depth = options_.prefetch_depth, .offloads_optimizer_state = options_.offload != Offload::kNone};
}

std::vector<bool> PlannedModel::recomputable() const {
  std::vector<bool> units;
  for (const auto kept : kept_if_recomputed_) units.push_back(kept != kNeverRecomputed);
  return units;
}

std::vector<std::string> PlannedModel::names() const {
  std::vector<std::string> names;
  for (const auto& plan : draft_.plans) names.push_back(shard::shown(plan.name));
  return names;
}

void PlannedModel::set_activations(const std::map<std::string, std::int64_t>& by_name) {
  auto activations = by_unit(by_name, "plan(): activations are given for");
  // A unit without parameters is never entered: the one around it holds its activations, or the first one.
  const auto is_empty = [this](std::size_t k) { return draft_.units[k].parameters.empty(); };
  for (std::size_t k = 0; k < activations.size(); ++k) {
    if (!is_empty(k)) continue;
    auto holder = draft_.plans[k].parent;
    while (holder != shard::UnitPlan::kNoParent && is_empty(holder)) holder = draft_.plans[holder].parent;
    for (std::size_t first = 0; holder == shard::UnitPlan::kNoParent && first < activations.size(); ++first) {
      if (!is_empty(first)) holder = first;
    }
    if (holder != shard::UnitPlan::kNoParent) activations[holder] += std::exchange(activations[k], 0);
  }
  activations_ = std::move(activations);
}

std::string PlannedModel::accumulation() const {
  return accumulation_text(microbatches(), planned_.sync_each_microbatch && settings_ == settings_.synchronized());
}

void PlannedModel::synchronize() {
  planned_.microbatches = microbatches().count;
  planned_.sync_each_microbatch = true;
  settings_ = settings_.synchronized();
}

PlannedModel::Steps PlannedModel::make(const Choice& choice) const {
  auto options = options_;
  options.prefetch_depth = choice.prefetch_depth;
  if (choice.offloads_optimizer_state) options.offload = std::max(options.offload, Offload::kOptimizerState);
  Steps steps;
  steps.engine = make_engine(draft_, options);
  for (const auto& unit : steps.engine->units()) {
    const auto k = unit->place.index;
    settings_.apply_to(unit->options, k);
    unit->options.requires_gradient_sync = unit->options.requires_gradient_sync && planned_.sync_each_microbatch;
    unit->options.requires_all_reduce = unit->options.requires_all_reduce && planned_.sync_each_microbatch;
    unit->options.kept_by_budget = !choice.kept.empty() && choice.kept[k];
  }
  steps.microbatches = microbatches();
  steps.passes = planned_.order.forward.empty() ? passes_ : given_order(planned_.order, *steps.engine);
  steps.activations = unit_activations(activations_, kept_if_recomputed_, choice.recomputed);
  steps.algorithm = make_algorithm(steps.engine, planned_.optimizer);
  return steps;
}

std::vector<std::int64_t> PlannedModel::by_unit(const std::map<std::string, std::int64_t>& by_name, const std::string& what) const {
  std::vector<std::int64_t> bytes;
  const auto known = names();
  for (const auto& name : known) {
    const auto found = by_name.find(name);
    bytes.push_back(found == by_name.end() ? 0 : found->second);
  }
  for (const auto& [name, count] : by_name) {
    if (std::ranges::find(known, name) == known.end()) throw Error(what + " unit '" + name + "', which the model does not have");
  }
  return bytes;
}

}  // namespace fsdp::planning
