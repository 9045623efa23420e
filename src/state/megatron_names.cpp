#include "fsdp/megatron_names.h"

#include <algorithm>
#include <map>
#include <memory>
#include <string_view>
#include <utility>

#include "engine/engine.h"
#include "fsdp/error.h"
#include "fsdp/fsdp_module.h"

namespace fsdp {

LoadOptions megatron_names(const std::vector<std::string>& parameters) {
  std::map<std::string, std::size_t> numbers;
  for (const auto& name : parameters) {
    if (!numbers.emplace(name, numbers.size()).second) {
      throw Error("megatron_names: parameter '" + name + "' is listed twice; an optimizer has each parameter once");
    }
  }
  LoadOptions options;
  options.model_prefix = "model.module.";
  options.optimizer_prefix = "optimizer.";
  options.rename = [numbers = std::move(numbers)](const std::string& key) {
    constexpr std::string_view kState = "optim.state.";
    const auto kind = key.rfind('.');
    if (!key.starts_with(kState) || kind < kState.size()) return key;
    const auto number = numbers.find(key.substr(kState.size(), kind - kState.size()));
    return number == numbers.end() ? key : std::string(kState) + std::to_string(number->second) + key.substr(kind);
  };
  return options;
}

LoadOptions megatron_names(torch::nn::Module& module) {
  std::vector<std::pair<std::size_t, std::string>> ordered;
  for (const auto& unit : handle(module).engine()->units()) {
    for (const auto& parameter : unit->parameters) ordered.emplace_back(parameter.position, parameter.name);
  }
  std::sort(ordered.begin(), ordered.end());
  std::vector<std::string> names;
  for (auto& [position, name] : ordered) names.push_back(std::move(name));
  return megatron_names(names);
}

}  // namespace fsdp
