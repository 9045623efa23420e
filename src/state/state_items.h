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

/// A tensor of a model's or optimizer's state, as much of it as this rank holds.
struct StateItem {
  std::vector<std::string> path;    ///< {"model", "layers.0.weight"}: where it is in nested dicts; the key is the path joined by dots.
  std::vector<std::int64_t> shape;  ///< Of the whole tensor.
  ckpt::Box box;                    ///< Of that, what this rank and those it shards with hold together: all, if it is not tensor-parallel.
  at::Tensor values;                ///< 1-D, contiguous, a view into the state: elements [offset, offset + numel) of the flattened box.
  std::int64_t offset = 0;
  /// What this rank writes, elements [own_begin, own_begin + own_numel) of `values`: no element is two ranks' own.
  std::int64_t own_begin = 0;
  std::int64_t own_numel = 0;
  /// Who writes it calls Engine::flush_writes or prepare_load before, so that another thread may read it (Engine::set_reader). Not so what
  /// operators write to as a model's parameter or buffer, and main parameters that users have views of.
  bool guarded = false;
  /// If defined, `values` is a row-major copy of this tensor. Who has written `values` calls assign_values(source, values).
  at::Tensor source = {};

  std::string key() const;
};

/// Parameters (their main ones) and buffers. `prefix` is the path's first part; empty: none.
std::vector<StateItem> model_items(torch::nn::Module& module, const std::string& prefix);

/// The state of an optimizer, by torch.optim's names, as get_optimizer_state_dict of torch.distributed.checkpoint arranges it:
/// {prefix, "state", parameter, "exp_avg"}: of parameters that have been updated.
std::vector<StateItem> optimizer_items(Optimizer& optimizer, const std::string& prefix);

/// The keys of all state that the optimizer may have on any rank.
std::vector<std::string> optimizer_keys(Optimizer& optimizer, const std::string& prefix);

/// How often each parameter that the optimizer updates has been updated: scalars of fp32, {prefix, "state", parameter, "step"}. Copies, and
/// right on the rank that owns the parameter's first element only. Of a parameter that has not been updated there is this 0 and nothing
/// else, so that whoever reads it need not guess whether its state was lost.
std::vector<StateItem> optimizer_step_items(Optimizer& optimizer, const std::string& prefix);

/// Sets the counts (0: not updated); optimizer_items then gives tensors for those that have been updated.
void set_optimizer_steps(Optimizer& optimizer, const std::function<std::int64_t(const std::string& parameter)>& steps);

}  // namespace fsdp::state
