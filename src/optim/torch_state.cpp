#include "optim/torch_state.h"

#include <ATen/ATen.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include "fsdp/error.h"

namespace fsdp::optim {
namespace {

using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamState;

/// A kind of state of the optimizer with these classes: `tensor` is a generic lambda that gives the member.
template <typename Options, typename State, typename Tensor, typename IsKept>
TorchState::Kind kind(std::string name, Tensor tensor, IsKept is_kept) {
  return {std::move(name), [is_kept](const OptimizerOptions& options) { return is_kept(static_cast<const Options&>(options)); },
          [tensor](OptimizerParamState& state) -> at::Tensor& { return tensor(static_cast<State&>(state)); }};
}

template <typename State>
void count_steps(TorchState& known) {
  known.steps = [](const OptimizerParamState& state) { return static_cast<const State&>(state).step(); };
  known.set_steps = [](OptimizerParamState& state, std::int64_t steps) { static_cast<State&>(state).step(steps); };
}

constexpr auto kAlways = [](const auto&) { return true; };

template <typename Options, typename State>
TorchState adam(bool is_decoupled) {
  TorchState known;
  known.kinds = {kind<Options, State>(
                     "exp_avg", [](State& state) -> at::Tensor& { return state.exp_avg(); }, kAlways),
                 kind<Options, State>(
                     "exp_avg_sq", [](State& state) -> at::Tensor& { return state.exp_avg_sq(); }, kAlways),
                 kind<Options, State>(
                     "max_exp_avg_sq", [](State& state) -> at::Tensor& { return state.max_exp_avg_sq(); },
                     [](const Options& options) { return options.amsgrad(); })};
  known.make = [] { return std::make_unique<State>(); };
  count_steps<State>(known);
  known.settings = [is_decoupled](const OptimizerOptions& any) {
    const auto& options = static_cast<const Options&>(any);
    return Settings{{"weight_decay", options.weight_decay()},
                    {"betas", std::pair(std::get<0>(options.betas()), std::get<1>(options.betas()))},
                    {"eps", options.eps()},
                    {"amsgrad", options.amsgrad()},
                    {"maximize", false},
                    {"foreach", {}},
                    {"capturable", false},
                    {"differentiable", false},
                    {"fused", {}},
                    {"decoupled_weight_decay", is_decoupled}};
  };
  known.place = [](OptimizerOptions& any, const std::string& name) -> SettingPlace {
    auto& options = static_cast<Options&>(any);
    if (name == "weight_decay") return &options.weight_decay();
    if (name == "betas") return &options.betas();
    if (name == "eps") return &options.eps();
    return {};
  };
  return known;
}

TorchState sgd() {
  using Options = torch::optim::SGDOptions;
  using State = torch::optim::SGDParamState;
  TorchState known;
  known.kinds = {kind<Options, State>(
      "momentum_buffer", [](State& state) -> at::Tensor& { return state.momentum_buffer(); },
      [](const Options& options) { return options.momentum() != 0; })};
  known.make = [] { return std::make_unique<State>(); };
  known.settings = [](const OptimizerOptions& any) {
    const auto& options = static_cast<const Options&>(any);
    return Settings{{"weight_decay", options.weight_decay()},
                    {"momentum", options.momentum()},
                    {"dampening", options.dampening()},
                    {"nesterov", options.nesterov()},
                    {"maximize", false},
                    {"foreach", {}},
                    {"differentiable", false},
                    {"fused", {}}};
  };
  known.place = [](OptimizerOptions& any, const std::string& name) -> SettingPlace {
    auto& options = static_cast<Options&>(any);
    if (name == "weight_decay") return &options.weight_decay();
    if (name == "momentum") return &options.momentum();
    if (name == "dampening") return &options.dampening();
    if (name == "nesterov") return &options.nesterov();
    return {};
  };
  return known;
}

TorchState rmsprop() {
  using Options = torch::optim::RMSpropOptions;
  using State = torch::optim::RMSpropParamState;
  TorchState known;
  known.kinds = {kind<Options, State>(
                     "square_avg", [](State& state) -> at::Tensor& { return state.square_avg(); }, kAlways),
                 kind<Options, State>(
                     "momentum_buffer", [](State& state) -> at::Tensor& { return state.momentum_buffer(); },
                     [](const Options& options) { return options.momentum() > 0; }),
                 kind<Options, State>(
                     "grad_avg", [](State& state) -> at::Tensor& { return state.grad_avg(); },
                     [](const Options& options) { return options.centered(); })};
  known.make = [] { return std::make_unique<State>(); };
  count_steps<State>(known);
  known.settings = [](const OptimizerOptions& any) {
    const auto& options = static_cast<const Options&>(any);
    return Settings{{"weight_decay", options.weight_decay()},
                    {"momentum", options.momentum()},
                    {"alpha", options.alpha()},
                    {"eps", options.eps()},
                    {"centered", options.centered()},
                    {"capturable", false},
                    {"foreach", {}},
                    {"maximize", false},
                    {"differentiable", false}};
  };
  known.place = [](OptimizerOptions& any, const std::string& name) -> SettingPlace {
    auto& options = static_cast<Options&>(any);
    if (name == "weight_decay") return &options.weight_decay();
    if (name == "momentum") return &options.momentum();
    if (name == "alpha") return &options.alpha();
    if (name == "eps") return &options.eps();
    return {};
  };
  return known;
}

TorchState adagrad() {
  using Options = torch::optim::AdagradOptions;
  using State = torch::optim::AdagradParamState;
  TorchState known;
  known.kinds = {kind<Options, State>(
      "sum", [](State& state) -> at::Tensor& { return state.sum(); }, kAlways)};
  known.initial = [](const OptimizerOptions& options, const at::Tensor& value) -> std::unique_ptr<OptimizerParamState> {
    auto state = std::make_unique<State>();
    state->step(0);
    state->sum(at::full_like(value, static_cast<const Options&>(options).initial_accumulator_value()));
    return state;
  };
  known.make = [] { return std::make_unique<State>(); };
  count_steps<State>(known);
  known.settings = [](const OptimizerOptions& any) {
    const auto& options = static_cast<const Options&>(any);
    return Settings{{"lr_decay", options.lr_decay()},
                    {"weight_decay", options.weight_decay()},
                    {"initial_accumulator_value", options.initial_accumulator_value()},
                    {"eps", options.eps()},
                    {"foreach", {}},
                    {"maximize", false},
                    {"differentiable", false},
                    {"fused", {}}};
  };
  known.place = [](OptimizerOptions& any, const std::string& name) -> SettingPlace {
    auto& options = static_cast<Options&>(any);
    if (name == "weight_decay") return &options.weight_decay();
    if (name == "lr_decay") return &options.lr_decay();
    if (name == "eps") return &options.eps();
    return {};
  };
  return known;
}

}  // namespace

const TorchState& torch_state_of(const torch::optim::Optimizer& optimizer) {
  static const auto of_adam = adam<torch::optim::AdamOptions, torch::optim::AdamParamState>(/*is_decoupled=*/false);
  static const auto of_adamw = adam<torch::optim::AdamWOptions, torch::optim::AdamWParamState>(/*is_decoupled=*/true);
  static const auto of_sgd = sgd();
  static const auto of_rmsprop = rmsprop();
  static const auto of_adagrad = adagrad();
  if (dynamic_cast<const torch::optim::Adam*>(&optimizer) != nullptr) return of_adam;
  if (dynamic_cast<const torch::optim::AdamW*>(&optimizer) != nullptr) return of_adamw;
  if (dynamic_cast<const torch::optim::SGD*>(&optimizer) != nullptr) return of_sgd;
  if (dynamic_cast<const torch::optim::RMSprop*>(&optimizer) != nullptr) return of_rmsprop;
  if (dynamic_cast<const torch::optim::Adagrad*>(&optimizer) != nullptr) return of_adagrad;
  throw Error(
      "wrap: checkpoints hold the state of torch's Adam, AdamW, SGD, RMSprop and Adagrad, which is kept for each element of a parameter; "
      "the wrapped optimizer is another one (LBFGS has one history of all parameters). Save and load the model alone");
}

}  // namespace fsdp::optim
