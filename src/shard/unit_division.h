#pragma once

#include <torch/nn/module.h>

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/fully_shard.h"

namespace fsdp::shard {

/// A unit that is to be made: its modules, and the parameters that it owns.
struct UnitPlan {
  static constexpr std::size_t kNoParent = static_cast<std::size_t>(-1);
  std::string name;                               ///< The module's name, "" for the root; several modules' joined by "+".
  std::vector<const torch::nn::Module*> modules;  ///< The modules of the unit, usually one.
  std::size_t parent = kNoParent;
  UnitSettings settings;
  std::vector<std::pair<std::string, at::Tensor>> parameters;  ///< In the order of named_parameters(), each tensor once.
};

/// Returns the name by which messages call a unit.
std::string shown(const std::string& unit_name);

/// The rules of a division, which are the fields of FullyShardOptions with these names.
struct DivisionRules {
  UnitPredicate units = {};
  std::vector<std::vector<std::string>> unit_groups = {};
  std::function<bool(const std::string& name, const at::Tensor& parameter)> ignore = {};
};

/// Divides a module's parameters into units: the root, every module that `units` accepts, and every group. Enclosing units come first. A
/// parameter, module or group that several units reach belongs to (lies in) their closest common ancestor. Throws Error if a group names a
/// module that does not exist, or that another group names, too.
std::vector<UnitPlan> divide(const torch::nn::Module& root, const DivisionRules& rules);

}  // namespace fsdp::shard
