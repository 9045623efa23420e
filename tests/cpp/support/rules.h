#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>

#include "fsdp/fsdp.h"
#include "support/twins.h"

// Optimizers against the same algorithm on whole tensors: equal gradients must give equal parameters, however the model is cut.
namespace fsdp::testing {

/// One whole parameter's update; keeps its state between calls.
using Rule = std::function<void(const std::string& name, at::Tensor& value, const at::Tensor& gradient)>;

/// The loss of one step on one rank's data.
using Loss = std::function<at::Tensor(Net& net, int step, int rank)>;

inline at::Tensor mean_square(Net& net, int step, int rank) { return net.forward(batch(rank + 10 * step)).square().mean(); }

/// AdamW by ATen's fused kernel; options by the parameter's name.
inline Rule fused_adamw(std::function<AdamWOptions(const std::string& name)> options_of) {
  struct State {
    at::Tensor first, second, step;
  };
  auto states = std::make_shared<std::map<std::string, State>>();
  return [options_of, states](const std::string& name, at::Tensor& value, const at::Tensor& gradient) {
    const auto options = options_of(name);
    const auto [found, is_new] = states->try_emplace(name);
    auto& state = found->second;
    if (is_new) state = {at::zeros_like(value), at::zeros_like(value), at::zeros({}, at::kFloat)};
    state.step += 1;
    at::_fused_adamw_({value}, {gradient}, {state.first}, {state.second}, {}, {state.step}, options.lr, std::get<0>(options.betas),
                      std::get<1>(options.betas), options.weight_decay, options.eps, false, false);
  };
}

struct RuleOptions {
  Loss loss = mean_square;
  std::function<void(Optimizer& optimizer, int step)> before_step = {};
  std::function<Granularity(const std::string& name, const at::Tensor& parameter)> granularity = {};
  double tolerance = 0;  ///< Of the parameters after each step; 0: the same bits.
};

/// Trains with every strategy; after each step the parameters must be what `rule` makes of the same gradients on whole tensors.
inline void expect_rule(const std::function<Optimizer(torch::nn::Module&)>& make_optimizer, const std::function<Rule()>& make_rule,
                        const RuleOptions& options = {}) {
  const auto mesh = line();
  for (const auto& strategy : all_strategies()) {
    const auto model = make_net();
    auto whole = values_of(*make_net());
    auto sharded = fully_shard(
        *model, {.mesh = mesh, .units = each_linear(), .placements = Placements::from_name(strategy), .granularity = options.granularity});
    auto optimizer = make_optimizer(*model);
    const auto rule = make_rule();
    for (int step = 0; step < 5; ++step) {
      optimizer.zero_grad();
      options.loss(*model, step, static_cast<int>(mesh.rank())).backward();
      const auto gradients = sharded.full_gradients();
      if (options.before_step) options.before_step(optimizer, step);
      optimizer.step();
      for (std::size_t i = 0; i < whole.size(); ++i) {
        if (gradients[i].second.defined()) rule(whole[i].first, whole[i].second, gradients[i].second);
      }
      expect_same(sharded.full_parameters(), whole, options.tolerance, strategy + ", step " + std::to_string(step));
    }
  }
}

}  // namespace fsdp::testing
