#include "fsdp/memory_budget.h"

#include <algorithm>
#include <exception>
#include <functional>
#include <memory>
#include <vector>

#include "api/registry.h"
#include "engine/engine.h"
#include "engine/recorded_order.h"
#include "fsdp/error.h"
#include "fsdp/fsdp_module.h"
#include "fully_shard/budget_choice.h"

namespace fsdp {
namespace {

std::shared_ptr<BudgetedModel> budgeted(const engine::Engine& engine) {
  return std::dynamic_pointer_cast<BudgetedModel>(engine.options().memory_choice);
}

/// `activations`: what each of these units has, or an error that other ranks must hear of.
void adjust(const torch::nn::Module& module, const std::function<std::vector<std::int64_t>(const std::vector<std::string>&)>& activations) {
  const auto engine = handle(module).engine();
  const auto model = budgeted(*engine);
  if (!model) throw Error("adjust_memory_budget(): the model has no memory budget; give FullyShardOptions::memory_budget to fully_shard");
  const auto names = model->names();
  std::vector<std::int64_t> bytes(names.size());
  std::string refusal;
  try {
    bytes = activations(names);
  } catch (const std::exception& error) {
    refusal = error.what();  // Other ranks wait for this one.
  }
  model->adjust(*engine, names, bytes, refusal);
}

void check(const std::string& what, std::int64_t bytes) {
  if (bytes < 0) throw Error("adjust_memory_budget(): " + what + " are " + std::to_string(bytes) + " bytes; give 0 or more");
}

}  // namespace

bool recomputes(const torch::nn::Module& unit) {
  const auto [engine, index] = api::Registry::instance().find(unit);
  return engine != nullptr && engine->units()[index]->options.recomputes;
}

UnitOrder recorded_order(const torch::nn::Module& module) {
  const auto engine = handle(module).engine();
  const auto names = [&](engine::Pass pass) {
    std::vector<std::string> units;
    for (const auto index : engine::recorded_order(*engine, pass)) units.push_back(engine->units()[index]->name);
    return units;
  };
  return {.forward = names(engine::Pass::kForward), .backward = names(engine::Pass::kBackward)};
}

std::string explain(const torch::nn::Module& module) {
  const auto model = budgeted(*handle(module).engine());
  return model ? model->explanation() : "no memory_budget: all options are as they were given\n";
}

void adjust_memory_budget(torch::nn::Module& module, const std::map<std::string, std::int64_t>& activations) {
  adjust(module, [&](const std::vector<std::string>& names) {
    std::vector<std::int64_t> bytes(names.size());
    for (const auto& [name, count] : activations) {
      const auto found = std::ranges::find(names, name);
      if (found == names.end()) throw Error("adjust_memory_budget(): '" + name + "' is no unit of the model");
      check("activations of '" + name + "'", count);
      bytes[static_cast<std::size_t>(found - names.begin())] = count;
    }
    return bytes;
  });
}

void adjust_memory_budget(torch::nn::Module& module, std::int64_t activations) {
  const auto engine = handle(module).engine();
  adjust(module, [&](const std::vector<std::string>& names) {
    check("activations", activations);
    if (std::ranges::any_of(engine->units(), [](const auto& unit) { return unit->options.recomputes; })) {
      throw Error(
          "adjust_memory_budget(): units recompute, so a sum does not contain the activations that each of them would keep; give "
          "activations by the names of units");
    }
    std::vector<std::int64_t> bytes(names.size());
    const std::size_t first = names.size() > 1 ? 1 : 0;  // The root is the first.
    const auto count = static_cast<std::int64_t>(names.size() - first);
    for (std::size_t k = first; k < names.size(); ++k) {
      bytes[k] = activations / count + (static_cast<std::int64_t>(k - first) < activations % count ? 1 : 0);
    }
    return bytes;
  });
}

}  // namespace fsdp
