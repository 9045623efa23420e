#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "optim/shard_optimizer.h"

namespace fsdp::optim {

/// How one of torch's optimizers keeps its state, which it lets nobody ask: each has classes of its own. Names are those of Python's.
struct TorchState {
  struct Kind {
    std::string name;
    /// Whether parameters with these options have it.
    std::function<bool(const torch::optim::OptimizerOptions& options)> is_kept;
    std::function<at::Tensor&(torch::optim::OptimizerParamState& state)> tensor;
  };
  std::vector<Kind> kinds;
  /// Of a parameter that has not been updated; empty where there is none before the first update. `value` is the parameter.
  std::function<std::unique_ptr<torch::optim::OptimizerParamState>(const torch::optim::OptimizerOptions& options, const at::Tensor& value)>
      initial;
  /// Without tensors.
  std::function<std::unique_ptr<torch::optim::OptimizerParamState>()> make;
  /// The number of updates; empty for an optimizer that does not count them, and has state from the first one on.
  std::function<std::int64_t(const torch::optim::OptimizerParamState& state)> steps;
  std::function<void(torch::optim::OptimizerParamState& state, std::int64_t steps)> set_steps;
  /// But for the learning rate.
  std::function<Settings(const torch::optim::OptimizerOptions& options)> settings;
  /// Of those, what can be set later: it decides neither which state there is, nor how a first one is made.
  std::function<SettingPlace(torch::optim::OptimizerOptions& options, const std::string& name)> place;
};

/// Of Adam, AdamW, SGD, RMSprop or Adagrad. Throws Error for another one.
const TorchState& torch_state_of(const torch::optim::Optimizer& optimizer);

}  // namespace fsdp::optim
