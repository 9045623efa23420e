#include "api/registry.h"

namespace fsdp::api {

Registry& Registry::instance() {
  static Registry registry;
  return registry;
}

void Registry::add(const torch::nn::Module* module, const std::shared_ptr<engine::Engine>& engine, std::size_t unit) {
  const std::lock_guard lock(mutex_);
  std::erase_if(entries_, [](const auto& entry) { return entry.second.engine.expired(); });
  entries_[module] = {engine, unit};
}

std::pair<std::shared_ptr<engine::Engine>, std::size_t> Registry::find(const torch::nn::Module* module) {
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find(module);
  if (found == entries_.end()) return {};
  return {found->second.engine.lock(), found->second.unit};
}

void Registry::remove(const std::shared_ptr<engine::Engine>& engine) {
  const std::lock_guard lock(mutex_);
  std::erase_if(entries_, [&](const auto& entry) { return entry.second.engine.lock() == engine; });
}

}  // namespace fsdp::api
