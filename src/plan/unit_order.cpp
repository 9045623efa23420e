#include "plan/unit_order.h"

#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <map>
#include <set>
#include <unordered_map>
#include <utility>

#include "fsdp/error.h"

namespace fsdp::planning {
namespace {

struct OfUnit {
  std::size_t unit = 0;
  std::size_t parameter = 0;
};

/// The modules of a model, in the order of their registration.
class ModuleOrder {
 public:
  explicit ModuleOrder(const std::vector<shard::UnitPlan>& plans) {
    for (std::size_t k = 0; k < plans.size(); ++k) {
      const auto& parameters = plans[k].parameters;
      for (std::size_t i = 0; i < parameters.size(); ++i) positions_[parameters[i].second.unsafeGetTensorImpl()] = {k, i};
    }
  }

  void visit(const torch::nn::Module& module) {
    std::map<std::size_t, Visit> uses;  // by unit
    bool trains = false;
    for (const auto& item : module.named_parameters(/*recurse=*/false)) {
      const auto position = positions_.find(item.value().unsafeGetTensorImpl());
      if (position == positions_.end()) continue;  // ignored
      const auto [unit, parameter] = position->second;
      auto& use = uses[unit];
      use.unit = unit;
      trains = trains || item.value().requires_grad();
      if (seen_.insert(position->first).second && item.value().requires_grad()) use.gradients.push_back(parameter);
    }
    for (auto& [unit, use] : uses) use.enters = needs_values_in_backward(module, trains);
    const auto own = forward_.size();
    for (const auto& [unit, use] : uses) forward_.push_back(use);
    const auto children = forward_.size();
    input_has_gradient_ = input_has_gradient_ || trains;
    for (const auto& child : module.named_children()) visit(*child.value());
    // Where a module uses its own parameters among units within it is not known. They are taken to be used before and after those: backward
    // then has their gradients for the longest time.
    for (std::size_t k = own; k < children; ++k) {
      const auto is_other = [unit = forward_[k].unit](const Visit& visit) { return visit.unit != unit; };
      if (!std::any_of(forward_.begin() + static_cast<std::ptrdiff_t>(children), forward_.end(), is_other)) continue;
      forward_.push_back({.unit = forward_[k].unit, .gradients = std::exchange(forward_[k].gradients, {})});
    }
  }

  std::vector<Visit> take() { return std::move(forward_); }

 private:
  /// Backward of an embedding needs no weights, and that of a linear layer only to compute the gradient of its input.
  bool needs_values_in_backward(const torch::nn::Module& module, bool trains) const {
    const auto is = [&]<typename... Types>() { return (... || (dynamic_cast<const Types*>(&module) != nullptr)); };
    if (is.operator()<torch::nn::EmbeddingImpl, torch::nn::EmbeddingBagImpl>()) return false;
    return input_has_gradient_ || (trains && !is.operator()<torch::nn::LinearImpl>());
  }

  std::unordered_map<const c10::TensorImpl*, OfUnit> positions_;
  std::set<const c10::TensorImpl*> seen_;
  bool input_has_gradient_ = false;
  std::vector<Visit> forward_;
};

std::vector<Visit> uses_of(const std::vector<std::string>& names, const engine::Engine& engine) {
  std::vector<Visit> visits;
  for (const auto& name : names) {
    const auto& units = engine.units();
    const auto unit = std::ranges::find_if(units, [&](const auto& one) { return one->name == name; });
    if (unit == units.end()) throw Error("plan(): the order names unit '" + name + "', which the model does not have");
    visits.push_back({.unit = (*unit)->place.index});
  }
  return visits;
}

}  // namespace

Passes module_order(const torch::nn::Module& module, const std::vector<shard::UnitPlan>& plans) {
  ModuleOrder order(plans);
  order.visit(module);
  auto forward = order.take();
  auto backward = reversed(forward);
  return {std::move(forward), std::move(backward)};
}

Passes given_order(const UnitOrder& order, const engine::Engine& engine) {
  Passes passes{.forward = uses_of(order.forward, engine), .backward = uses_of(order.backward, engine)};
  if (order.backward.empty()) passes.backward = reversed(passes.forward);
  // A unit that backward enters several times gets its first gradient the first time, and the last ones the last time.
  std::map<std::size_t, std::pair<Visit*, Visit*>> of_unit;  // the first and the last visit
  for (auto& visit : passes.backward) {
    auto& [first, last] = of_unit.try_emplace(visit.unit, &visit, nullptr).first->second;
    last = &visit;
  }
  std::vector<Visit> never_entered;
  for (const auto& unit : engine.units()) {
    std::vector<std::size_t> gradients;
    for (std::size_t i = unit->parameters.size(); i-- > 0;) {
      if (unit->parameters[i].trainable) gradients.push_back(i);
    }
    if (gradients.empty()) continue;
    const auto entered = of_unit.find(unit->place.index);
    if (entered == of_unit.end()) {
      never_entered.insert(never_entered.begin(), {.unit = unit->place.index, .enters = false, .gradients = std::move(gradients)});
      continue;
    }
    const auto& [first, last] = entered->second;
    if (first != last && gradients.size() > 1) {
      first->gradients = {gradients.front()};
      gradients.erase(gradients.begin());
    }
    last->gradients = std::move(gradients);
  }
  passes.backward.insert(passes.backward.end(), never_entered.begin(), never_entered.end());
  return passes;
}

}  // namespace fsdp::planning
