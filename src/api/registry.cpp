#include "api/registry.h"

#include <torch/nn/module.h>

#include <algorithm>

namespace fsdp::api {

Registry& Registry::instance() {
  static Registry registry;
  return registry;
}

void Registry::add(const torch::nn::Module& module, const std::shared_ptr<engine::Engine>& engine, std::size_t unit) {
  const std::lock_guard lock(mutex_);
  std::erase_if(entries_, [](const auto& item) {
    const auto& entry = item.second;
    return entry.engine.expired() || (entry.owned && entry.module.expired());
  });
  const auto owner = module.weak_from_this();
  entries_[&module] = {.engine = engine, .unit = unit, .module = owner, .owned = !owner.expired()};
}

std::pair<std::shared_ptr<engine::Engine>, std::size_t> Registry::find(const torch::nn::Module& module) {
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find(&module);
  if (found == entries_.end()) return {};
  auto engine = found->second.engine.lock();
  if (!engine || !is_of(found->second, module, *engine)) return {};
  return {std::move(engine), found->second.unit};
}

/// True if the module is the one that the entry was made for, and not another one at its address: then its parameters are the engine's.
bool Registry::is_of(const Entry& entry, const torch::nn::Module& module, const engine::Engine& engine) {
  if (entry.owned) return !entry.module.expired();
  const auto parameters = module.parameters();
  const auto has = [&](const engine::UnitParameter& known) {
    const auto tensor = known.tensor.lock();
    return std::any_of(parameters.begin(), parameters.end(), [&](const at::Tensor& own) { return own.getIntrusivePtr() == tensor; });
  };
  return std::all_of(engine.units().begin(), engine.units().end(), [](const auto& unit) { return unit->parameters.empty(); }) ||
         std::any_of(engine.units().begin(), engine.units().end(),
                     [&](const auto& unit) { return std::any_of(unit->parameters.begin(), unit->parameters.end(), has); });
}

void Registry::remove(const std::shared_ptr<engine::Engine>& engine) {
  const std::lock_guard lock(mutex_);
  std::erase_if(entries_, [&](const auto& entry) { return entry.second.engine.lock() == engine; });
}

}  // namespace fsdp::api
