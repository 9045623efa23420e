#include "fsdp/plan.h"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <set>
#include <utility>

#include "comm/mesh/null_mesh.h"
#include "comm/traffic.h"
#include "engine/engine.h"
#include "fsdp/error.h"
#include "memory/slot_storage.h"
#include "optim/shard_optimizer.h"
#include "plan/fsdp2_memory.h"
#include "plan/observe.h"
#include "plan/planned_step.h"
#include "plan/unit_order.h"
#include "shard/model_draft.h"

namespace fsdp {
namespace {

using engine::Engine;
using engine::Unit;
using planning::Highest;

/// How many ranks of a row are on each of its hosts, as comm::ranks_per_host counts them.
int ranks_per_host(int size, std::int64_t stride, std::int64_t on_host) {
  if (on_host == 0 || size * stride <= on_host) return size;
  if (stride >= on_host || on_host % stride != 0) return 1;
  const auto ranks = static_cast<int>(on_host / stride);
  return size % ranks == 0 ? ranks : 1;
}

comm::Traffic traffic_of(c10::DeviceType type, int size, int on_host, bool shared_memory) {
  if (type != c10::kCPU) return comm::Traffic::by_backend(size, comm::TwoLevels::of(size, on_host));
  return shared_memory && on_host > 1 ? comm::Traffic::by_shared_memory(size, on_host) : comm::Traffic::by_messages(size);
}

/// An algorithm that computes nothing, and keeps for each element what the optimizer keeps.
std::shared_ptr<optim::Algorithm> make_algorithm(const std::shared_ptr<Engine>& engine, PlannedOptimizer optimizer) {
  std::vector<optim::StateKind> kinds;
  if (optimizer == PlannedOptimizer::kSGDMomentum) kinds = {{"momentum_buffer"}};
  if (optimizer == PlannedOptimizer::kAdamW) kinds = optim::adamw(engine, {}, {})->kinds();
  const auto nothing = [](const optim::GroupSettings&, double, std::vector<optim::Segment*>&) {};
  return std::make_shared<optim::Elementwise>(engine, optim::Groups(optim::adam_defaults({}), {}, optim::adam_rules({})), std::move(kinds),
                                              nothing);
}

std::shared_ptr<Engine> make_engine(shard::ModelDraft& draft, const FullyShardOptions& options) {
  const auto engine = std::make_shared<Engine>(engine::EngineOptions{.mesh = options.mesh,
                                                                     .tensor_parallel = draft.tensor_parallel,
                                                                     .prefetch_depth = options.prefetch_depth,
                                                                     .keep_gathered_bytes = options.keep_gathered_bytes,
                                                                     .events_source = 0});
  for (std::size_t k = 0; k < draft.plans.size(); ++k) {
    const auto& plan = draft.plans[k];
    auto& [parameters, layout, formats] = draft.units[k];
    for (auto& parameter : parameters) parameter.tensor = engine::UnitParameter().tensor;  // The model's are not the plan's.
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

std::vector<std::int64_t> activations_of(const Engine& engine, const PlanOptions& planned) {
  std::vector<std::int64_t> activations;
  std::set<std::string> known;
  for (const auto& unit : engine.units()) {
    const auto found = planned.activations.find(unit->name);
    activations.push_back(found == planned.activations.end() ? 0 : found->second);
    known.insert(unit->name);
  }
  for (const auto& [name, bytes] : planned.activations) {
    if (!known.contains(name)) throw Error("plan(): activations are given for unit '" + name + "', which the model does not have");
  }
  // A unit without parameters is never entered: the one around it holds its activations, or the first one.
  const auto& units = engine.units();
  for (std::size_t k = 0; k < units.size(); ++k) {
    if (!units[k]->parameters.empty()) continue;
    const auto* around = units[k]->place.parent;
    while (around != nullptr && around->parameters.empty()) around = around->place.parent;
    const auto holder =
        std::ranges::find_if(units, [&](const auto& unit) { return around != nullptr ? unit.get() == around : !unit->parameters.empty(); });
    if (holder != units.end()) activations[static_cast<std::size_t>(holder - units.begin())] += std::exchange(activations[k], 0);
  }
  return activations;
}

/// A model on a planned mesh.
class PlannedTraining {
 public:
  /// `kept`: see planning::observe.
  PlannedTraining(const torch::nn::Module& module, const FullyShardOptions& options, const PlanOptions& planned,
                  const std::vector<bool>& kept) {
    const torch::NoGradGuard no_grad;
    if (!options.mesh.defined() || !options.mesh.device().is_meta()) {
      throw Error("plan(): options.mesh is no planned mesh; make it, and the meshes of units, by planned_device_mesh()");
    }
    shard::ModelDraft draft;
    shard::draft_model(module, options, draft);
    passes_ = planning::module_order(module, draft.plans);
    engine_ = make_engine(draft, options);
    for (std::size_t k = 0; k < kept.size(); ++k) engine_->units()[k]->options.kept_after_forward = kept[k];
    if (!planned.order.forward.empty()) passes_ = planning::given_order(planned.order, *engine_);
    activations_ = activations_of(*engine_, planned);
    algorithm_ = make_algorithm(engine_, planned.optimizer);
  }

  /// Calls `use` with the steps of the model.
  template <typename Use>
  auto with_steps(const Use& use) const {
    const torch::NoGradGuard no_grad;
    const auto update = [this](Highest&) {  // as Optimizer::step()
      engine_->main().flush_writes();
      engine_->main().finish_gradient_sync();
      algorithm_->step();
      engine_->main().changed();
    };
    planning::PlannedSteps steps(engine_, passes_, planning::Trigger::kPaging, update);
    steps.set_activations(activations_);
    return use(steps);
  }

  /// Adds what steps do not tell, after they have run.
  void describe(Plan& plan) const {
    for (const auto& state : algorithm_->state()) {
      plan.units[state.unit->place.index].optimizer_state += static_cast<std::int64_t>(state.values.nbytes());
    }
    plan.fsdp2 = planning::fsdp2_memory({.engine = *engine_,
                                         .passes = passes_,
                                         .activations = activations_,
                                         .optimizer_values = static_cast<std::int64_t>(algorithm_->kinds().size())});
  }

 private:
  std::shared_ptr<Engine> engine_;
  planning::Passes passes_;
  std::vector<std::int64_t> activations_;
  std::shared_ptr<optim::Algorithm> algorithm_;
};

/// At least the bytes of the peak that are padding. Each kind of a unit's memory is padded as much as its whole parameters.
std::int64_t padding_of(const Plan& plan) {
  double padding = 0;
  for (const auto& unit : plan.units) {
    if (unit.gathered == 0) continue;
    const auto all =
        unit.main_parameters + unit.main_gradients + unit.optimizer_state + unit.gathered + unit.unreduced + unit.communication;
    padding += static_cast<double>(unit.padding) / static_cast<double>(unit.gathered) * static_cast<double>(all);
  }
  return static_cast<std::int64_t>(std::ceil(padding));
}

}  // namespace

DeviceMesh planned_device_mesh(const std::string& device_type, std::vector<MeshDim> dims, PlannedMeshOptions options) {
  if (device_type != "cpu" && device_type != "cuda") {
    throw Error("planned_device_mesh: device type '" + device_type + "' is not known; use \"cpu\" (Gloo) or \"cuda\" (NCCL)");
  }
  if (options.ranks_per_host < 0) throw Error("planned_device_mesh: ranks_per_host " + std::to_string(options.ranks_per_host));
  const auto type = device_type == "cpu" ? c10::kCPU : c10::kCUDA;
  return comm::make_null_mesh({.dims = std::move(dims),
                               .rank = options.rank,
                               .device = c10::Device(c10::kMeta),
                               .stands_for = type,
                               .traffic = [type, options](int size, std::int64_t stride) {
                                 const int on_host = ranks_per_host(size, stride, options.ranks_per_host);
                                 return traffic_of(type, size, on_host, options.shared_memory);
                               }});
}

planning::Observed planning::observe(const torch::nn::Module& module, const FullyShardOptions& options, const PlanOptions& planned,
                                     const std::vector<bool>& kept) {
  return PlannedTraining(module, options, planned, kept).with_steps([](auto& steps) { return steps.observe(); });
}

Plan plan(const torch::nn::Module& module, const FullyShardOptions& options, const PlanOptions& planned) {
  const PlannedTraining model(module, options, planned, {});
  auto plan = model.with_steps([](auto& steps) { return steps.run(); });
  model.describe(plan);
  return plan;
}

std::optional<Plan> smallest_world(const std::function<Plan(std::int64_t ranks)>& plan_for, std::int64_t bytes, std::int64_t step,
                                   std::int64_t most) {
  if (step < 1) throw Error("smallest_world(): step " + std::to_string(step) + "; give the ranks of a host, or 1");
  constexpr int kNeighbours = 64;
  const auto most_steps = most / step;
  /// The first number of steps after `fails` with which `holds`, if that is so for all larger ones, too.
  const auto first_after = [&](std::int64_t fails, const std::function<bool(const Plan&)>& holds) {
    std::optional<std::pair<std::int64_t, Plan>> found;
    for (std::int64_t ahead = 1; !found; ahead *= 2) {
      if (fails >= most_steps) return found;
      const auto next = std::min(fails + ahead, most_steps);
      auto plan = plan_for(next * step);
      if (holds(plan)) {
        found.emplace(next, std::move(plan));
      } else {
        fails = next;
      }
    }
    while (found->first - fails > 1) {
      const auto middle = fails + (found->first - fails) / 2;
      auto plan = plan_for(middle * step);
      if (holds(plan)) {
        found.emplace(middle, std::move(plan));
      } else {
        fails = middle;
      }
    }
    return found;
  };
  // Padding apart, more ranks never need more. So no smaller world fits than the first that would without padding.
  auto found = first_after(0, [&](const Plan& plan) { return plan.peak.device() - padding_of(plan) <= bytes; });
  for (int k = 0; k < kNeighbours && found; ++k) {
    if (found->second.fits(bytes)) return found->second;
    if (found->first == most_steps) return std::nullopt;
    const auto next = found->first + 1;
    found.emplace(next, plan_for(next * step));
  }
  if (!found) return std::nullopt;
  found = first_after(found->first - 1, [&](const Plan& plan) { return plan.fits(bytes); });
  if (!found) return std::nullopt;
  return found->second;
}

}  // namespace fsdp
