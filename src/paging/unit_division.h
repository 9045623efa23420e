#pragma once

#include <torch/nn/module.h>

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/fully_shard.h"

namespace fsdp::paging {

/// A unit to be: the modules that make it, and the parameters that it owns.
struct UnitPlan {
  static constexpr std::size_t kNoParent = static_cast<std::size_t>(-1);
  std::string name;  ///< The module's name, "" for the root.
  const torch::nn::Module* module = nullptr;
  std::size_t parent = kNoParent;
  UnitSettings settings;
  std::vector<std::pair<std::string, at::Tensor>> parameters;  ///< In the order of named_parameters(), each tensor once.
};

/// Divides a module's parameters into units: the root, and every module that `is_unit` accepts. Enclosing units come first. A parameter or
/// module that several units reach belongs to (lies in) their closest common ancestor.
std::vector<UnitPlan> divide(const torch::nn::Module& root, const UnitPredicate& is_unit);

}  // namespace fsdp::paging
