#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "engine/engine.h"

namespace torch::nn {
class Module;
}

namespace fsdp::api {

/// Which modules are units of which engine. The hooks of parameters own the engines; the registry does not. An entry whose module has been
/// destroyed is not found for another module at the same address, even if a parameter or a graph still keeps the engine alive. Such entries
/// are removed later.
class Registry {
 public:
  static Registry& instance();

  void add(const torch::nn::Module& module, const std::shared_ptr<engine::Engine>& engine, std::size_t unit);
  /// The engine and the unit's position in it; a null engine if the module is no unit.
  std::pair<std::shared_ptr<engine::Engine>, std::size_t> find(const torch::nn::Module& module);
  void remove(const std::shared_ptr<engine::Engine>& engine);

 private:
  struct Entry {
    std::weak_ptr<engine::Engine> engine;
    std::size_t unit = 0;
    std::weak_ptr<const torch::nn::Module> module;
    bool owned = false;  ///< Whether a shared pointer owns the module, so that `module` expires with it. A module on the stack has none.
  };
  static bool is_of(const Entry& entry, const torch::nn::Module& module, const engine::Engine& engine);

  std::mutex mutex_;  // models may be sharded from several threads
  std::unordered_map<const torch::nn::Module*, Entry> entries_;
};

}  // namespace fsdp::api
