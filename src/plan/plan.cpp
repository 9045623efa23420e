#include "fsdp/plan.h"

#include <torch/torch.h>

#include <algorithm>
#include <memory>
#include <set>
#include <utility>

#include "comm/mesh/null_mesh.h"
#include "comm/traffic.h"
#include "engine/engine.h"
#include "fsdp/error.h"
#include "memory/slot_storage.h"
#include "optim/shard_optimizer.h"
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
  return activations;
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
  const torch::NoGradGuard no_grad;
  if (!options.mesh.defined() || !options.mesh.device().is_meta()) {
    throw Error("plan(): options.mesh is no planned mesh; make it, and the meshes of units, by planned_device_mesh()");
  }
  shard::ModelDraft draft;
  shard::draft_model(module, options, draft);
  auto passes = planning::module_order(module, draft.plans);
  const auto engine = make_engine(draft, options);
  for (std::size_t k = 0; k < kept.size(); ++k) engine->units()[k]->options.kept_after_forward = kept[k];
  if (!planned.order.forward.empty()) passes = planning::given_order(planned.order, *engine);
  const auto algorithm = make_algorithm(engine, planned.optimizer);
  const auto update = [&](Highest&) {  // as Optimizer::step()
    engine->main().flush_writes();
    engine->main().finish_gradient_sync();
    algorithm->step();
    engine->main().changed();
  };
  planning::PlannedSteps steps(engine, std::move(passes), planning::Trigger::kPaging, update);
  steps.set_activations(activations_of(*engine, planned));
  auto observed = steps.observe();
  for (const auto& state : algorithm->state()) {
    observed.plan.units[state.unit->place.index].optimizer_state += static_cast<std::int64_t>(state.values.nbytes());
  }
  return observed;
}

Plan plan(const torch::nn::Module& module, const FullyShardOptions& options, const PlanOptions& planned) {
  return planning::observe(module, options, planned, {}).plan;
}

std::optional<Plan> smallest_world(const std::function<Plan(std::int64_t ranks)>& plan_for, std::int64_t bytes, std::int64_t step,
                                   std::int64_t most) {
  if (step < 1) throw Error("smallest_world(): step " + std::to_string(step) + "; give the ranks of a host, or 1");
  std::int64_t fails = 0;  // in steps
  std::int64_t hosts = 1;
  auto plan = plan_for(step);
  while (!plan.fits(bytes)) {
    fails = hosts;
    if (hosts >= most / step) return std::nullopt;
    hosts = std::min(2 * hosts, most / step);
    plan = plan_for(hosts * step);
  }
  while (hosts - fails > 1) {
    const auto middle = fails + (hosts - fails) / 2;
    auto found = plan_for(middle * step);
    if (found.fits(bytes)) {
      hosts = middle;
      plan = std::move(found);
    } else {
      fails = middle;
    }
  }
  return plan;
}

}  // namespace fsdp
