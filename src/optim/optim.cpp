#include "fsdp/optim.h"

#include <map>
#include <utility>

#include "optim/fused.h"
#include "optim/shard_optimizer.h"

namespace fsdp {
namespace {

using optim::Elementwise;
using optim::require;
using optim::Segment;

optim::StepTensors tensors_of(const std::vector<Segment*>& segments) {
  optim::StepTensors tensors;
  tensors.states.resize(segments.front()->state.size());
  for (auto* segment : segments) {
    tensors.values.push_back(segment->value);
    tensors.gradients.push_back(segment->gradient);
    tensors.steps.push_back(segment->step);
    for (std::size_t s = 0; s < segment->state.size(); ++s) tensors.states[s].push_back(segment->state[s]);
  }
  return tensors;
}

std::unique_ptr<optim::Algorithm> sgd(std::shared_ptr<engine::Engine> engine, const SGDOptions& options,
                                      const std::vector<ParamGroup>& groups) {
  const auto update = [](const optim::GroupSettings& group, double lr, std::vector<Segment*>& segments) {
    // The first update of a segment sets its momentum to the gradient instead of damping it in, as torch does.
    std::map<bool, std::vector<Segment*>> parts;
    for (auto* segment : segments) parts[segment->updates == 1].push_back(segment);
    for (auto& [is_first, part] : parts) {
      auto tensors = tensors_of(part);
      tensors.steps.clear();
      optim::step_sgd(tensors, {.lr = lr,
                                .momentum = group.momentum,
                                .dampening = group.dampening,
                                .weight_decay = group.weight_decay,
                                .nesterov = group.nesterov,
                                .is_first = is_first});
    }
  };
  const auto describe = [](const optim::GroupSettings& group) {
    return optim::Settings{{"momentum", group.momentum},
                           {"dampening", group.dampening},
                           {"nesterov", group.nesterov},
                           {"maximize", false},
                           {"foreach", {}},
                           {"differentiable", false},
                           {"fused", {}}};
  };
  const auto validate = [](const optim::GroupSettings& group) {
    require(group.momentum >= 0, "SGD: momentum must be at least 0");
    require(!group.nesterov || (group.momentum > 0 && group.dampening == 0), "SGD: nesterov needs momentum and no dampening");
  };
  const optim::GroupSettings defaults{.lr = {options.lr},
                                      .weight_decay = options.weight_decay,
                                      .momentum = options.momentum,
                                      .dampening = options.dampening,
                                      .nesterov = options.nesterov};
  return std::make_unique<Elementwise>(
      std::move(engine), optim::Groups(defaults, groups, {describe, validate}),
      options.momentum != 0 ? std::vector<optim::StateKind>{{"momentum_buffer"}} : std::vector<optim::StateKind>{}, update);
}

}  // namespace

optim::GroupRules optim::adam_rules(const Settings& more) {
  const auto describe = [more](const GroupSettings& group) {
    Settings settings{{"betas", std::pair(std::get<0>(group.betas), std::get<1>(group.betas))},
                      {"eps", group.eps},
                      {"amsgrad", false},
                      {"maximize", false},
                      {"foreach", {}},
                      {"capturable", false},
                      {"differentiable", false},
                      {"fused", {}},
                      {"decoupled_weight_decay", true}};
    settings.insert(settings.end(), more.begin(), more.end());
    return settings;
  };
  const auto validate = [](const GroupSettings& group) {
    const auto [beta1, beta2] = group.betas;
    require(beta1 >= 0 && beta1 < 1 && beta2 >= 0 && beta2 < 1, "AdamW: betas must lie in [0, 1)");
    require(group.eps >= 0, "AdamW: eps must be at least 0");
  };
  return {describe, validate};
}

optim::GroupSettings optim::adam_defaults(const AdamWOptions& options) {
  return {.lr = {options.lr}, .weight_decay = options.weight_decay, .betas = options.betas, .eps = options.eps};
}

std::unique_ptr<optim::Algorithm> optim::adamw(std::shared_ptr<engine::Engine> engine, const AdamWOptions& options,
                                               const std::vector<ParamGroup>& groups, const Selection& selection, const Settings& more) {
  const auto update = [](const GroupSettings& group, double lr, std::vector<Segment*>& segments) {
    step_adam(tensors_of(segments), {.lr = lr,
                                     .beta1 = std::get<0>(group.betas),
                                     .beta2 = std::get<1>(group.betas),
                                     .weight_decay = group.weight_decay,
                                     .eps = group.eps});
  };
  return std::make_unique<Elementwise>(std::move(engine), Groups(adam_defaults(options), groups, adam_rules(more)),
                                       std::vector<StateKind>{{"exp_avg"}, {"exp_avg_sq"}}, update, selection);
}

AdamW::AdamW(torch::nn::Module& module, AdamWOptions options, std::vector<ParamGroup> groups) : Optimizer(std::make_unique<State>(module)) {
  state_->algorithms.push_back(optim::adamw(state_->engine, options, groups));
}

SGD::SGD(torch::nn::Module& module, SGDOptions options, std::vector<ParamGroup> groups) : Optimizer(std::make_unique<State>(module)) {
  state_->algorithms.push_back(sgd(state_->engine, options, groups));
}

}  // namespace fsdp
