#include "shard/unit_division.h"

#include <algorithm>
#include <map>
#include <set>
#include <unordered_map>

#include "fsdp/error.h"

namespace fsdp::shard {
namespace {

class Division {
 public:
  explicit Division(const DivisionRules& rules) : rules_(rules), unit_of_group_(rules.unit_groups.size(), UnitPlan::kNoParent) {
    for (std::size_t g = 0; g < rules.unit_groups.size(); ++g) {
      for (const auto& name : rules.unit_groups[g]) {
        if (!group_of_.emplace(name, g).second) throw Error("unit_groups names module '" + name + "' twice; a module is in one unit");
      }
    }
  }

  std::vector<UnitPlan> run(const torch::nn::Module& root) {
    add("", root, UnitPlan::kNoParent);
    visit(root, "", 0);
    for (const auto& [name, group] : group_of_) {
      if (!seen_.contains(name)) throw Error("unit_groups names module '" + name + "', which the model does not have below its root");
    }
    for (auto& use : uses_) plans_[use.unit].parameters.emplace_back(std::move(use.name), std::move(use.tensor));
    // A shared module's parent may have moved up since it was found, but an ancestor always has the smaller index: order holds.
    return std::move(plans_);
  }

 private:
  struct Use {
    std::string name;
    at::Tensor tensor;
    std::size_t unit;
  };

  void visit(const torch::nn::Module& module, const std::string& prefix, std::size_t unit) {
    for (const auto& item : module.named_parameters(/*recurse=*/false)) {
      if (!item.value().defined() || (rules_.ignore && rules_.ignore(prefix + item.key(), item.value()))) continue;
      const auto [found, is_new] = use_of_.emplace(item.value().unsafeGetTensorImpl(), uses_.size());
      if (is_new) {
        uses_.push_back({prefix + item.key(), item.value(), unit});
      } else {
        auto& use = uses_[found->second];
        use.unit = common_ancestor(use.unit, unit);
      }
    }
    for (const auto& child : module.named_children()) {
      const std::string name = prefix + child.key();
      visit(*child.value(), name + ".", unit_for(*child.value(), name, unit));
    }
  }

  std::size_t unit_for(const torch::nn::Module& module, const std::string& name, std::size_t enclosing) {
    const auto group = group_of_.find(name);
    if (group != group_of_.end()) seen_.insert(name);
    const auto found = unit_of_.find(&module);
    if (found != unit_of_.end()) return reached_from(enclosing, found->second);
    if (group == group_of_.end()) {
      if (!rules_.units || !rules_.units(name, module)) return enclosing;
      return unit_of_[&module] = add(name, module, enclosing);
    }
    auto& unit = unit_of_group_[group->second];
    if (unit == UnitPlan::kNoParent) {
      unit = add(name, module, enclosing);
    } else {
      plans_[unit].name += "+" + name;
      plans_[unit].modules.push_back(&module);
      reached_from(enclosing, unit);
    }
    return unit_of_[&module] = unit;
  }

  std::size_t add(const std::string& name, const torch::nn::Module& module, std::size_t parent) {
    plans_.push_back({.name = name, .modules = {&module}, .parent = parent, .settings = {}, .parameters = {}});
    return plans_.size() - 1;
  }

  /// Returns the index of a unit that has been reached again, possibly from within another unit.
  std::size_t reached_from(std::size_t enclosing, std::size_t unit) {
    if (enclosing != unit) plans_[unit].parent = common_ancestor(plans_[unit].parent, enclosing);
    return unit;
  }

  std::size_t common_ancestor(std::size_t a, std::size_t b) const {
    std::vector<std::size_t> line;
    for (auto unit = a; unit != UnitPlan::kNoParent; unit = plans_[unit].parent) line.push_back(unit);
    auto unit = b;
    while (std::find(line.begin(), line.end(), unit) == line.end()) unit = plans_[unit].parent;
    return unit;
  }

  const DivisionRules& rules_;
  std::map<std::string, std::size_t> group_of_;
  std::vector<std::size_t> unit_of_group_;
  std::set<std::string> seen_;  // the names in group_of_ that were found
  std::vector<UnitPlan> plans_;
  std::vector<Use> uses_;
  std::unordered_map<const c10::TensorImpl*, std::size_t> use_of_;
  std::unordered_map<const torch::nn::Module*, std::size_t> unit_of_;
};

}  // namespace

std::string shown(const std::string& unit_name) { return unit_name.empty() ? "(root)" : unit_name; }

std::vector<UnitPlan> divide(const torch::nn::Module& root, const DivisionRules& rules) { return Division(rules).run(root); }

}  // namespace fsdp::shard
