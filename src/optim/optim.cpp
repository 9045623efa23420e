#include "fsdp/optim.h"

#include <torch/torch.h>

#include <map>
#include <utility>

#include "optim/shard_optimizer.h"

namespace fsdp {
namespace {

using optim::Elementwise;
using optim::require;
using optim::Segment;

/// The fused kernels take segments of one dtype.
std::map<at::ScalarType, std::vector<Segment*>> by_dtype(const std::vector<Segment*>& segments) {
  std::map<at::ScalarType, std::vector<Segment*>> parts;
  for (auto* segment : segments) parts[segment->value.scalar_type()].push_back(segment);
  return parts;
}

struct Lists {
  std::vector<at::Tensor> values, gradients, steps;
  std::vector<std::vector<at::Tensor>> states;
};

Lists lists_of(const std::vector<Segment*>& segments) {
  Lists lists;
  lists.states.resize(segments.front()->state.size());
  for (auto* segment : segments) {
    lists.values.push_back(segment->value);
    lists.gradients.push_back(segment->gradient.to(segment->value.scalar_type()));
    lists.steps.push_back(segment->step);
    for (std::size_t s = 0; s < segment->state.size(); ++s) lists.states[s].push_back(segment->state[s]);
  }
  return lists;
}

std::unique_ptr<optim::Part> sgd(std::shared_ptr<engine::Engine> engine, const SGDOptions& options, const std::vector<ParamGroup>& groups) {
  require(options.momentum >= 0, "SGD: momentum must be at least 0");
  require(!options.nesterov || (options.momentum > 0 && options.dampening == 0), "SGD: nesterov needs momentum and no dampening");
  const auto update = [options](const optim::Group& group, double lr, std::vector<Segment*>& segments) {
    // The first update of a segment sets its momentum to the gradient instead of damping it in, as torch does.
    std::map<std::pair<at::ScalarType, bool>, std::vector<Segment*>> parts;
    for (auto* segment : segments) {
      parts[{segment->value.scalar_type(), segment->step.item<float>() == 1}].push_back(segment);
    }
    for (auto& [key, part] : parts) {
      auto lists = lists_of(part);
      at::_fused_sgd_(lists.values, lists.gradients, options.momentum != 0 ? lists.states[0] : std::vector<at::Tensor>{},
                      group.weight_decay, options.momentum, lr, options.dampening, options.nesterov, /*maximize=*/false,
                      /*is_first_step=*/key.second);
    }
  };
  return std::make_unique<Elementwise>(
      std::move(engine), optim::Groups({options.lr, options.weight_decay}, groups),
      options.momentum != 0 ? std::vector<optim::StateKind>{{"momentum_buffer"}} : std::vector<optim::StateKind>{},
      optim::Settings{{"momentum", options.momentum},
                      {"dampening", options.dampening},
                      {"nesterov", options.nesterov},
                      {"maximize", false},
                      {"foreach", {}},
                      {"differentiable", false},
                      {"fused", {}}},
      update);
}

}  // namespace

optim::Settings optim::adam_settings(const std::tuple<double, double>& betas, double eps) {
  return {{"betas", std::pair(std::get<0>(betas), std::get<1>(betas))},
          {"eps", eps},
          {"amsgrad", false},
          {"maximize", false},
          {"foreach", {}},
          {"capturable", false},
          {"differentiable", false},
          {"fused", {}},
          {"decoupled_weight_decay", true}};
}

std::unique_ptr<optim::Part> optim::adamw(std::shared_ptr<engine::Engine> engine, const AdamWOptions& options,
                                          const std::vector<ParamGroup>& groups, const Selection& selection) {
  const auto [beta1, beta2] = options.betas;
  require(beta1 >= 0 && beta1 < 1 && beta2 >= 0 && beta2 < 1, "AdamW: betas must lie in [0, 1)");
  require(options.eps >= 0, "AdamW: eps must be at least 0");
  const auto update = [options](const Group& group, double lr, std::vector<Segment*>& segments) {
    for (auto& [dtype, part] : by_dtype(segments)) {
      auto lists = lists_of(part);
      at::_fused_adamw_(lists.values, lists.gradients, lists.states[0], lists.states[1], /*max_exp_avg_sqs=*/{}, lists.steps, lr,
                        std::get<0>(options.betas), std::get<1>(options.betas), group.weight_decay, options.eps, /*amsgrad=*/false,
                        /*maximize=*/false);
    }
  };
  return std::make_unique<Elementwise>(std::move(engine), Groups({options.lr, options.weight_decay}, groups),
                                       std::vector<StateKind>{{"exp_avg"}, {"exp_avg_sq"}}, adam_settings(options.betas, options.eps),
                                       update, selection);
}

AdamW::AdamW(torch::nn::Module& module, AdamWOptions options, std::vector<ParamGroup> groups) : Optimizer(std::make_unique<State>(module)) {
  state_->parts.push_back(optim::adamw(state_->engine, options, groups));
}

SGD::SGD(torch::nn::Module& module, SGDOptions options, std::vector<ParamGroup> groups) : Optimizer(std::make_unique<State>(module)) {
  state_->parts.push_back(sgd(state_->engine, options, groups));
}

}  // namespace fsdp
