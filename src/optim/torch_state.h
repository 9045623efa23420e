#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "optim/shard_optimizer.h"

namespace fsdp::optim {

/// Access to the state of one of torch's optimizers. Torch has no common interface for it; each optimizer has classes of its own. The names
/// are those of torch.optim in Python.
struct TorchState {
  struct Kind {
    std::string name;
    /// Returns whether parameters with these options have this kind of state.
    std::function<bool(const torch::optim::OptimizerOptions& options)> is_kept;
    std::function<at::Tensor&(torch::optim::OptimizerParamState& state)> tensor;
  };
  std::vector<Kind> kinds;
  /// Makes the state of a parameter, `value`, that has not been updated. The function is empty if the optimizer has no state before the
  /// first update.
  std::function<std::unique_ptr<torch::optim::OptimizerParamState>(const torch::optim::OptimizerOptions& options, const at::Tensor& value)>
      initial;
  /// Makes a state without tensors.
  std::function<std::unique_ptr<torch::optim::OptimizerParamState>()> make;
  /// Returns the number of updates. The function is empty for an optimizer that does not count them and has state from the first update on.
  std::function<std::int64_t(const torch::optim::OptimizerParamState& state)> steps;
  std::function<void(torch::optim::OptimizerParamState& state, std::int64_t steps)> set_steps;
  /// Returns the settings, without the learning rate.
  std::function<Settings(const torch::optim::OptimizerOptions& options)> settings;
  /// Returns the place of a setting that can be changed later. Settings that decide which state exists, or how the first one is made,
  /// cannot.
  std::function<SettingPlace(torch::optim::OptimizerOptions& options, const std::string& name)> place;
};

/// Returns the access for Adam, AdamW, SGD, RMSprop or Adagrad. Throws Error for other optimizers.
const TorchState& torch_state_of(const torch::optim::Optimizer& optimizer);

}  // namespace fsdp::optim
