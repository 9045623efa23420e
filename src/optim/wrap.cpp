#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <map>
#include <utility>

#include "fsdp/error.h"
#include "fsdp/optim.h"
#include "optim/shard_optimizer.h"
#include "optim/torch_state.h"

namespace fsdp {
namespace optim {

/// This rank's part of a trainable parameter, as the wrapped optimizer sees it.
struct WrappedShard {
  engine::Unit* unit;
  std::size_t parameter;
  at::Tensor value;  ///< 1-D, possibly empty.
};

}  // namespace optim

namespace {

using optim::require;
using optim::WrappedShard;
using torch::optim::OptimizerParamState;

/// Access to the wrapped optimizer's state, for checkpoints. The state stays in the optimizer, and is looked up each time, because the
/// user's program can change it, too.
class WrappedAlgorithm final : public optim::Algorithm {
 public:
  WrappedAlgorithm(const std::vector<WrappedShard>& shards, torch::optim::Optimizer& optimizer) : optimizer_(optimizer) {
    std::map<const void*, std::size_t> group_of;
    for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g) {
      for (const auto& value : optimizer.param_groups()[g].params()) group_of[value.unsafeGetTensorImpl()] = g;
    }
    for (const auto& shard : shards) {
      const auto group = group_of.find(shard.value.unsafeGetTensorImpl());
      if (group != group_of.end()) entries_[{shard.unit, shard.parameter}] = {shard.value, group->second, nullptr};
    }
    for (std::size_t g = 0; g < group_count(); ++g) rates_.push_back({.base = options(g).get_lr()});
  }

  void step() override {
    // After a step, no load is undone.
    for (auto& [key, entry] : entries_) entry.set_aside.reset();
    optimizer_.step();
  }

  std::size_t group_count() const override { return optimizer_.param_groups().size(); }
  bool has_parameters(std::size_t) const override { return true; }
  /// The options hold the present rate. If the program has set a rate there, it is the new base rate.
  optim::LearningRate lr(std::size_t group) const override {
    const auto now = options(group).get_lr();
    return group < rates_.size() && rates_[group].now() == now ? rates_[group] : optim::LearningRate{.base = now};
  }
  void set_lr(std::size_t group, const optim::LearningRate& lr) override {
    if (!(lr.base >= 0)) throw Error("learning rate " + std::to_string(lr.base) + "; give 0 or more");
    rates_.resize(std::max(rates_.size(), group + 1));
    rates_[group] = lr;
    options(group).set_lr(lr.now());
  }

  const std::vector<optim::StateKind>& kinds() const override {
    kinds_.clear();
    for (const auto& kind : known().kinds) {
      const auto& groups = optimizer_.param_groups();
      if (std::any_of(groups.begin(), groups.end(), [&](const auto& group) { return kind.is_kept(group.options()); })) {
        kinds_.push_back({kind.name});
      }
    }
    return kinds_;
  }

  bool updates(const engine::Unit& unit, std::size_t parameter) const override {
    known();
    return entries_.contains({&unit, parameter});
  }

  std::int64_t steps(const engine::Unit& unit, std::size_t parameter) const override {
    const auto* state = state_of(entries_.at({&unit, parameter}));
    if (state == nullptr) return 0;
    return known().steps ? known().steps(*state) : 1;
  }

  /// It can be undone until the next step; until then, no state is lost.
  void set_steps(const engine::Unit& unit, std::size_t parameter, std::int64_t steps) override {
    auto& entry = entries_.at({&unit, parameter});
    auto& current = optimizer_.state()[entry.value.unsafeGetTensorImpl()];
    if (steps == 0) {
      if (this->steps(unit, parameter) > 0) {
        entry.set_aside = std::move(current);
        if (known().initial) current = known().initial(options_of(entry), entry.value);
      }
      if (current == nullptr) optimizer_.state().erase(entry.value.unsafeGetTensorImpl());
      return;
    }
    if (this->steps(unit, parameter) == 0 && entry.set_aside != nullptr) current = std::move(entry.set_aside);
    if (current == nullptr) current = known().make();
    for (const auto& kind : known().kinds) {
      auto& values = kind.tensor(*current);
      if (kind.is_kept(options_of(entry)) && !values.defined()) values = at::zeros_like(entry.value, at::MemoryFormat::Preserve);
    }
    if (known().set_steps) known().set_steps(*current, steps);
  }

  std::vector<optim::StateTensor> state() override {
    std::vector<optim::StateTensor> tensors;
    for (auto& [key, entry] : entries_) {
      const auto& [unit, parameter] = key;
      if (entry.value.numel() == 0 || steps(*unit, parameter) == 0) continue;
      for (const auto& kind : known().kinds) {
        const auto& values = kind.tensor(*state_of(entry));
        if (!kind.is_kept(options_of(entry)) || !values.defined()) continue;
        tensors.push_back({.unit = unit, .parameter = parameter, .kind = {kind.name}, .values = values});
      }
    }
    return tensors;
  }

  std::vector<optim::GroupDescription> groups() const override {
    std::vector<optim::GroupDescription> groups(group_count());
    for (std::size_t g = 0; g < groups.size(); ++g) {
      groups[g].lr = lr(g);
      groups[g].settings = known().settings(options(g));
      groups[g].settings.insert(groups[g].settings.begin(), {"lr", groups[g].lr.now()});
    }
    std::vector<std::pair<std::size_t, std::pair<std::size_t, std::string>>> ordered;  // position, group, name
    for (const auto& [key, entry] : entries_) {
      const auto& parameter = key.first->parameters[key.second];
      ordered.push_back({parameter.position, {entry.group, parameter.name}});
    }
    std::sort(ordered.begin(), ordered.end());
    for (auto& [position, named] : ordered) groups[named.first].parameters.push_back(std::move(named.second));
    return groups;
  }

  void restore(std::size_t group, const optim::Settings& settings) override {
    optim::restore(known().settings(options(group)), settings,
                   [&](const std::string& name) { return known().place(options(group), name); });
  }

 private:
  struct Entry {
    at::Tensor value;
    std::size_t group = 0;
    std::unique_ptr<OptimizerParamState> set_aside;  ///< The state that set_steps(0) has set aside.
  };

  const optim::TorchState& known() const { return optim::torch_state_of(optimizer_); }
  torch::optim::OptimizerOptions& options(std::size_t group) const { return optimizer_.param_groups()[group].options(); }
  const torch::optim::OptimizerOptions& options_of(const Entry& entry) const { return options(entry.group); }

  /// Null if there is none.
  OptimizerParamState* state_of(const Entry& entry) const {
    const auto found = optimizer_.state().find(entry.value.unsafeGetTensorImpl());
    return found == optimizer_.state().end() ? nullptr : found->second.get();
  }

  torch::optim::Optimizer& optimizer_;
  std::vector<optim::LearningRate> rates_;  // the rates of its groups when they were last set here
  std::map<std::pair<const engine::Unit*, std::size_t>, Entry> entries_;
  mutable std::vector<optim::StateKind> kinds_;  // the last result of kinds(), kept because options may change
};

}  // namespace

struct WrappedOptimizer::Wrapped : Optimizer::State {
  Wrapped(torch::nn::Module& module, const NamedTorchOptimizerFactory& factory) : State(module) {
    for (const auto& unit : engine->units()) {
      require(unit->options.offload != Offload::kOptimizerState,
              "wrap: a torch::optim optimizer keeps its state where the parameters are; use Offload::kAll or kNone, or an optimizer of "
              "this library");
      for (std::size_t i = 0; i < unit->parameters.size(); ++i) {
        if (!unit->parameters[i].trainable) continue;
        const auto slice = unit->main_slice(i);
        auto value = unit->main.parts[slice.sub_buffer].narrow(0, slice.offset, slice.numel).detach().requires_grad_();
        shards.push_back({unit.get(), i, std::move(value)});
      }
    }
    const auto info = [](const WrappedShard& shard) -> const auto& { return shard.unit->parameters[shard.parameter]; };
    std::sort(shards.begin(), shards.end(), [&](const auto& a, const auto& b) { return info(a).position < info(b).position; });
    std::vector<at::Tensor> parameters;
    std::vector<std::string> names;
    for (const auto& shard : shards) {
      parameters.push_back(shard.value);
      names.push_back(info(shard).name);
    }
    optimizer = factory(std::move(parameters), std::move(names));
    require(optimizer != nullptr, "wrap: the factory returned no optimizer");
    has_defaults = false;
    algorithms.push_back(std::make_unique<WrappedAlgorithm>(shards, *optimizer));
  }

  void step() override {
    for (auto& shard : shards) {
      if (!shard.unit->parameters[shard.parameter].has_gradient) continue;
      const auto slice = shard.unit->main_slice(shard.parameter);
      const auto gradient = shard.unit->main_gradient.parts[slice.sub_buffer].narrow(0, slice.offset, slice.numel);
      shard.value.mutable_grad() = gradient.to(shard.value.scalar_type());
    }
    // The gradients are taken back even after an exception, because zero_grad() must be able to free their memory.
    const auto taken_back = c10::make_scope_exit([&] {
      for (auto& shard : shards) shard.value.mutable_grad() = at::Tensor();
    });
    State::step();
  }

  std::vector<WrappedShard> shards;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
};

WrappedOptimizer::WrappedOptimizer(torch::nn::Module& module, const NamedTorchOptimizerFactory& factory)
    : Optimizer(std::make_unique<Wrapped>(module, factory)) {}

WrappedOptimizer::WrappedOptimizer(torch::nn::Module& module, const TorchOptimizerFactory& factory)
    : WrappedOptimizer(module, NamedTorchOptimizerFactory([&](std::vector<at::Tensor> parameters, std::vector<std::string>) {
                         return factory(std::move(parameters));
                       })) {}

torch::optim::Optimizer& WrappedOptimizer::torch_optimizer() { return *static_cast<Wrapped&>(*state_).optimizer; }

WrappedOptimizer wrap(torch::nn::Module& module, const TorchOptimizerFactory& factory) { return WrappedOptimizer(module, factory); }

WrappedOptimizer wrap(torch::nn::Module& module, const NamedTorchOptimizerFactory& factory) { return WrappedOptimizer(module, factory); }

}  // namespace fsdp
