#include "fully_shard/budget_choice.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "comm/mesh/ranks.h"
#include "fsdp/error.h"
#include "fsdp/plan.h"
#include "plan/observe.h"
#include "plan/planned_mesh.h"

namespace fsdp {
namespace {

using planning::Choice;
using planning::Remedy;

/// The options of a plan: those of the model, on planned meshes. `options` must outlive the result.
class PlannedOptions {
 public:
  explicit PlannedOptions(const FullyShardOptions& options)
      : twins_(std::make_shared<planning::PlannedMeshes>(options.separate_reduce_group, options.reshard_after_forward_size)),
        planned_(options) {
    planned_.mesh = twins_->of(options.mesh);
    if (options.unit_settings) {
      planned_.unit_settings = [twins = twins_, &options](const std::string& name, const torch::nn::Module& module) {
        auto settings = options.unit_settings(name, module);
        if (settings.mesh.defined()) settings.mesh = twins->of(settings.mesh);
        return settings;
      };
    }
    if (options.tensor_parallel) {
      planned_.tensor_parallel = [twins = twins_, &options](const std::string& name, const at::Tensor& parameter) {
        auto piece = options.tensor_parallel(name, parameter);
        if (piece) piece->mesh = twins->of(piece->mesh);
        return piece;
      };
    }
  }

  FullyShardOptions with(const Choice& choice) const {
    auto options = planned_;
    options.prefetch_depth = choice.prefetch_depth;
    if (choice.offloads_optimizer_state) options.offload = std::max(options.offload, Offload::kOptimizerState);
    return options;
  }

 private:
  std::shared_ptr<planning::PlannedMeshes> twins_;
  FullyShardOptions planned_;
};

/// Worlds with more ranks in the dimension that is sharded over.
std::vector<std::int64_t> larger_worlds(const DeviceMesh& mesh) {
  constexpr std::int64_t kMostTimes = 64;
  std::vector<std::int64_t> ranks;
  for (std::int64_t times = 2; times <= kMostTimes; times *= 2) ranks.push_back(mesh.size() * times);
  return ranks;
}

/// What may help where nothing fits, the cheapest first.
std::vector<Remedy> remedies_for(const FullyShardOptions& options, const std::function<std::int64_t(const FullyShardOptions&)>& bytes) {
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
  if (!options.mixed_precision || !options.mixed_precision->param_dtype) {
    add("mixed_precision with param_dtype at::kBFloat16", [](auto& changed) {
      if (!changed.mixed_precision) changed.mixed_precision = MixedPrecisionPolicy();
      changed.mixed_precision->param_dtype = at::kBFloat16;
    });
  }
  if (options.offload != Offload::kAll) add("offload = Offload::kAll", [](auto& changed) { changed.offload = Offload::kAll; });
  if (options.unit_settings || options.tensor_parallel) return remedies;  // on meshes that can't be made larger here
  for (const auto ranks : larger_worlds(options.mesh)) {
    add(std::to_string(ranks) + " ranks", [ranks](auto& changed) {
      auto dims = changed.mesh.dims();
      dims.back().size *= ranks / changed.mesh.size();
      changed.mesh = planned_device_mesh(changed.mesh.device_type() == c10::kCPU ? "cpu" : "cuda", std::move(dims));
    });
  }
  return remedies;
}

}  // namespace

planning::Chosen choose_within_budget(const torch::nn::Module& module, const shard::ModelDraft& draft, FullyShardOptions& options) {
  const auto given = options;
  const PlannedOptions planned(given);
  const auto observe = [&](const Choice& choice) {
    return planning::observe(module, planned.with(choice), given.memory_budget->planned, choice.kept);
  };
  planning::Budget budget{.bytes = given.memory_budget->bytes,
                          .given = {.prefetch_depth = given.prefetch_depth, .offloads_optimizer_state = given.offload != Offload::kNone},
                          .may_offload = given.offload == Offload::kNone,
                          .offload_option = "offload = Offload::kOptimizerState",
                          .observe = observe};
  if (draft.tensor_parallel.defined()) {
    budget.largest = [ranks = comm::Ranks(draft.tensor_parallel)](std::vector<std::int64_t> numbers) {
      const auto all = ranks.exchange(at::tensor(numbers, at::kLong), {.operation = "memory_budget", .unit = "(model)"}).amax(0);
      std::copy_n(all.const_data_ptr<std::int64_t>(), numbers.size(), numbers.begin());
      return numbers;
    };
  }
  auto chosen = planning::choose(budget);
  if (!chosen.fits) {
    // With another option, the least prefetch depth may be another one. It needs least without read-ahead.
    auto least = chosen.choice;
    least.prefetch_depth = 0;
    const auto remedies = remedies_for(planned.with(least), [&](const FullyShardOptions& changed) {
      std::vector<std::int64_t> most{planning::observe(module, changed, given.memory_budget->planned, {}).most};
      return budget.largest ? budget.largest(std::move(most)).front() : most.front();
    });
    throw Error(planning::too_small(budget, chosen, remedies));
  }
  options.prefetch_depth = chosen.choice.prefetch_depth;
  if (chosen.choice.offloads_optimizer_state) options.offload = std::max(options.offload, Offload::kOptimizerState);
  return chosen;
}

}  // namespace fsdp
