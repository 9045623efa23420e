#include "fsdp/fully_shard.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "api/late_registrations.h"
#include "api/registry.h"
#include "base/exception_text.h"
#include "comm/communicator.h"
#include "comm/mesh/ranks.h"
#include "deferred/deferred_record.h"
#include "engine/agreement.h"
#include "engine/tensor_bytes.h"
#include "fsdp/error.h"
#include "fully_shard/budget_choice.h"
#include "memory/device_memory.h"
#include "paging/paged_storage.h"
#include "shard/initial_values.h"
#include "shard/model_draft.h"

namespace fsdp {
namespace {

using engine::Engine;
using engine::Unit;

std::unique_ptr<Unit> make_unit(shard::UnitDraft draft, const shard::UnitPlan& plan, const FullyShardOptions& options,
                                const engine::UnitCommunicators& communicators) {
  auto storage = c10::make_intrusive<paging::PagedStorage>(options.mesh.device());
  auto unit =
      std::make_unique<Unit>(shard::shown(plan.name), std::move(draft.parameters), std::move(draft.layout), std::move(draft.formats),
                             shard::unit_options(plan, options, communicators), communicators, c10::Storage(storage));
  storage->unit = unit.get();
  // A graph or a view may keep the storage longer than the unit exists. The storage is then marked, because it can no longer be filled.
  unit->trigger = std::shared_ptr<void>(storage.get(), [](void* pointer) {
    auto* orphan = static_cast<paging::PagedStorage*>(pointer);
    orphan->unit = nullptr;
    orphan->engine = nullptr;
  });
  return unit;
}

/// Runs all steps even if some of them fail, because other ranks take part in them. A failed collective ends it.
class Steps {
 public:
  template <typename Step>
  void run(const Step& step) {
    try {
      step();
    } catch (const CommError&) {
      throw;
    } catch (...) {
      if (!failure_) text_ = current_exception_text();
      if (!failure_) failure_ = std::current_exception();
    }
  }
  const std::string& text() const { return text_; }
  void rethrow() const {
    if (failure_) std::rethrow_exception(failure_);
  }

 private:
  std::exception_ptr failure_;
  std::string text_;
};

/// Compares a text over the mesh, and another over the ranks that hold other pieces, if there are any. If either differs, throws Error on
/// all ranks of both: those whose own row has agreed would wait for the others.
void compare_everywhere(const DeviceMesh& mesh, const DeviceMesh& tensor_parallel, const std::string& of_mesh,
                        const std::string& of_pieces) {
  const comm::Label label{.operation = "fully_shard", .unit = "(model)"};
  if (!tensor_parallel.defined()) return comm::Ranks(mesh).compare(of_mesh, label);
  std::exception_ptr first;
  std::string differs;
  const auto compare = [&](const DeviceMesh& ranks, const std::string& text) {
    try {
      comm::Ranks(ranks).compare(first ? differs : text, label);
    } catch (const CommError&) {
      throw;
    } catch (const Error& error) {
      if (first) return;
      first = std::current_exception();
      differs = std::string("refused: ") + error.what();
    }
  };
  compare(mesh, of_mesh);
  compare(tensor_parallel, of_pieces);
  compare(mesh, "the pieces are alike");
  if (first) std::rethrow_exception(first);
}

/// The numbers of the model, one for each set of ranks of its units.
class ModelNumbers {
 public:
  std::uint64_t operator()(const DeviceMesh& mesh) {
    std::vector<std::shared_ptr<comm::Communicator>> rows;
    for (const auto& dim : mesh.dims()) rows.push_back(mesh.communicator(dim.name));
    for (const auto& [others, number] : known_) {
      if (others == rows) return number;
    }
    return known_.emplace_back(rows, engine::agree_on_model(comm::Ranks(rows), "").model).second;
  }

 private:
  std::vector<std::pair<std::vector<std::shared_ptr<comm::Communicator>>, std::uint64_t>> known_;
};

/// Warns of initial values that differ, unless the program has written others since. Called on all ranks of the units.
void warn_of(const std::vector<engine::DifferentValues>& different, Engine& engine) {
  const bool untouched = engine.main().may_be_lost();
  for (const auto& [unit, parameter, text] : different) {
    auto warns = untouched;
    if (unit->replicated_parameters() && !unit->has_separate_main()) {  // Writes to these are not noticed, but each rank has all values.
      const auto checksum = engine::checksum(unit->whole_parameter(unit->whole.buffer.parts, parameter), engine::kSampledElements);
      const auto all = comm::Ranks({unit->communicators.outer, unit->communicators.gather})
                           .exchange(at::tensor({checksum}, at::kLong), {.operation = "comparison of values", .unit = "(model)"});
      warns = all.ne(checksum).any().item<bool>();
    }
    if (warns) TORCH_WARN("fsdp: ", text);
  }
}

}  // namespace

FSDPModule fully_shard(torch::nn::Module& module, FullyShardOptions options) {
  const at::NoGradGuard no_grad;
  if (deferred::current_session()) throw Error("fully_shard inside of deferred_init; call it on the result");
  if (!options.mesh.defined()) options.mesh = init_device_mesh("cpu", {{"dp_shard", -1}});
  // If this rank refuses the model, it notifies the other ranks, which would wait for it. Nothing is changed until all ranks agree.
  shard::ModelDraft draft;
  std::exception_ptr refusal;
  try {
    shard::draft_model(module, options, draft);
  } catch (const std::exception& error) {
    refusal = std::current_exception();
    draft.description = std::string("refused: ") + error.what();
  }
  compare_everywhere(options.mesh, draft.tensor_parallel, draft.description, refusal ? draft.description : draft.pieces);
  if (refusal) std::rethrow_exception(refusal);
  if (draft.tensor_parallel.defined()) shard::place_pieces(draft, options);
  if (!draft.warning.empty() && options.mesh.rank() == 0) TORCH_WARN("fsdp: ", draft.warning, ".");
  std::shared_ptr<BudgetedModel> budgeted;
  if (options.memory_budget) {
    budgeted = std::make_shared<BudgetedModel>(module, draft, options);
    options.prefetch_depth = budgeted->choice().prefetch_depth;
    if (budgeted->choice().offloads_optimizer_state) options.offload = std::max(options.offload, Offload::kOptimizerState);
  }

  ModelNumbers number_on;
  const auto engine = std::make_shared<Engine>(engine::EngineOptions{.mesh = options.mesh,
                                                                     .tensor_parallel = draft.tensor_parallel,
                                                                     .model = number_on(options.mesh),
                                                                     .prefetch_depth = options.prefetch_depth,
                                                                     .keep_gathered_bytes = options.keep_gathered_bytes,
                                                                     .report_nan_in_param_grad = options.report_nan_in_param_grad,
                                                                     .memory_choice = budgeted});
  const auto model = std::make_shared<paging::PagedModel>();
  Steps filling;
  std::vector<engine::UnitText> initial;
  for (std::size_t k = 0; k < draft.plans.size(); ++k) {
    auto& plan = draft.plans[k];
    const auto communicators =
        engine::communicators_of(plan.settings.mesh, options.separate_reduce_group, options.reshard_after_forward_size);
    auto& unit = engine->add(make_unit(std::move(draft.units[k]), plan, options, communicators));
    unit.place.model = number_on(plan.settings.mesh);
    if (plan.parent != shard::UnitPlan::kNoParent) unit.place.parent = engine->units()[plan.parent].get();
    auto* storage = static_cast<paging::PagedStorage*>(unit.whole.buffer.storage.unsafeGetStorageImpl());
    storage->engine = engine.get();
    storage->model = model;
    unit.allocate_main(engine->accounting());
    auto& checksums = initial.emplace_back().first_values;
    filling.run([&] { shard::fill_main(unit, plan, options, checksums); });
    if (options.check_initial_values) filling.run([&] { shard::expect_same_values(plan, checksums); });
    // Frees the original memory unit by unit, unless the program still holds it.
    for (std::size_t i = 0; i < plan.parameters.size(); ++i) paging::page(plan.parameters[i].second, engine, unit, i);
    for (const auto* unit_module : plan.modules) api::Registry::instance().add(*unit_module, engine, k);
  }
  if (budgeted) budgeted->apply_to(*engine);
  filling.run([&] { shard::fill_buffers(draft.plans, engine->units(), options.initial_values); });
  compare_everywhere(options.mesh, draft.tensor_parallel, filling.text(), filling.text());
  filling.rethrow();
  std::vector<engine::DifferentValues> different;
  if (options.initial_values == InitialValues::kOwn && !options.check_initial_values) {
    different = engine::agree(engine->units(), initial, options.mesh.rank());
  }
  model->validate = api::check_of_registrations(module);
  if (!different.empty()) {  // The program may load others before it trains.
    model->after_first_backward = [&owner = *engine, different = std::move(different)] { warn_of(different, owner); };
  }
  if (budgeted) {
    model->validate = [check = model->validate, choice = budgeted.get(), of = std::weak_ptr(engine), model = model.get()] {
      if (check) check();
      if (const auto sharded = of.lock()) choice->reconsider(*sharded, model->adds_to_gradients);  // whose options hold the choice
    };
  }
  return FSDPModule(engine, 0);
}

void fully_unshard(torch::nn::Module& module) {
  const at::NoGradGuard no_grad;
  const auto engine = handle(module).engine();
  engine->main().flush_writes();
  for (const auto& unit : engine->units()) {
    const auto main = engine->main().gather_main(*unit, unit->main.parts);
    for (std::size_t i = 0; i < unit->parameters.size(); ++i) {
      const auto& parameter = unit->parameters[i];
      const auto tensor = parameter.tensor.lock();
      if (tensor)
        paging::unpage(at::Tensor(tensor), unit->whole_parameter(main, i).to(parameter.dtype, /*non_blocking=*/false, /*copy=*/true));
    }
    engine->reshard(*unit);
  }
  engine->main().retire();
  api::Registry::instance().remove(engine);
}

}  // namespace fsdp
