#include "paging/unit_division.h"

#include <algorithm>
#include <unordered_map>

namespace fsdp::paging {
namespace {

class Division {
 public:
  explicit Division(const UnitPredicate& is_unit) : is_unit_(is_unit) {}

  std::vector<UnitPlan> run(const torch::nn::Module& root) {
    plans_.push_back({.name = "", .module = &root, .parent = UnitPlan::kNoParent, .settings = {}, .parameters = {}});
    visit(root, "", 0);
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
      if (!item.value().defined()) continue;
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
    const auto found = unit_of_.find(&module);
    if (found != unit_of_.end()) {
      auto& plan = plans_[found->second];
      plan.parent = common_ancestor(plan.parent, enclosing);
      return found->second;
    }
    if (!is_unit_ || !is_unit_(name, module)) return enclosing;
    unit_of_.emplace(&module, plans_.size());
    plans_.push_back({.name = name, .module = &module, .parent = enclosing, .settings = {}, .parameters = {}});
    return plans_.size() - 1;
  }

  std::size_t common_ancestor(std::size_t a, std::size_t b) const {
    std::vector<std::size_t> line;
    for (auto unit = a; unit != UnitPlan::kNoParent; unit = plans_[unit].parent) line.push_back(unit);
    auto unit = b;
    while (std::find(line.begin(), line.end(), unit) == line.end()) unit = plans_[unit].parent;
    return unit;
  }

  const UnitPredicate& is_unit_;
  std::vector<UnitPlan> plans_;
  std::vector<Use> uses_;
  std::unordered_map<const c10::TensorImpl*, std::size_t> use_of_;
  std::unordered_map<const torch::nn::Module*, std::size_t> unit_of_;
};

}  // namespace

std::vector<UnitPlan> divide(const torch::nn::Module& root, const UnitPredicate& is_unit) { return Division(is_unit).run(root); }

}  // namespace fsdp::paging
