#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "checkpoint/boxes.h"
#include "fsdp/fsdp_module.h"
#include "fsdp/optim.h"

namespace fsdp::state {

/// A tensor of the state of a model or an optimizer, with the part of it that this rank holds.
struct StateItem {
  std::vector<std::string> path;    ///< {"model", "layers.0.weight"}: its path in nested dicts. The key is the path joined by dots.
  std::vector<std::int64_t> shape;  ///< The shape of the whole tensor.
  ckpt::Box
      box;  ///< The box that this rank and the ranks with which it shards hold together: the whole tensor, unless it is tensor-parallel.
  at::Tensor values;  ///< 1-D, contiguous, a view into the state: elements [offset, offset + numel) of the flattened box.
  std::int64_t offset = 0;
  /// This rank writes elements [own_begin, own_begin + own_numel) of `values`. Every element is written by one rank only.
  std::int64_t own_begin = 0;
  std::int64_t own_numel = 0;
  /// Whether all code that writes the values calls MainParameters::flush_writes or prepare_load before, so that another thread may read
  /// them (MainParameters::set_reader). This does not hold for parameters and buffers that operators write directly, and for main
  /// parameters of which users have views.
  bool guarded = false;
  /// If defined, `values` is a row-major copy of this tensor. Code that has written `values` calls assign_values(source, values).
  at::Tensor source = {};

  std::string key() const;
};

/// Returns the main parameters and the buffers. `prefix` is the first part of each path; empty for none.
std::vector<StateItem> model_items(torch::nn::Module& module, const std::string& prefix);

/// Returns the state of an optimizer for the parameters that have been updated, with torch.optim's names and in the arrangement of
/// torch.distributed.checkpoint's get_optimizer_state_dict: {prefix, "state", parameter, "exp_avg"}.
std::vector<StateItem> optimizer_items(Optimizer& optimizer, const std::string& prefix);

/// Returns the keys of all state that the optimizer may have on any rank.
std::vector<std::string> optimizer_keys(Optimizer& optimizer, const std::string& prefix);

/// Returns the number of updates of each parameter that the optimizer updates, as fp32 scalars: {prefix, "state", parameter, "step"}. They
/// are copies, and correct only on the rank that owns the parameter's first element. A parameter that has not been updated has only this
/// item, with the value 0. A reader therefore knows that its state is not lost.
std::vector<StateItem> optimizer_step_items(Optimizer& optimizer, const std::string& prefix);

/// Sets the counts (0: not updated); optimizer_items then gives tensors for those that have been updated.
void set_optimizer_steps(Optimizer& optimizer, const std::function<std::int64_t(const std::string& parameter)>& steps);

}  // namespace fsdp::state
