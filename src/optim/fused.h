#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <vector>

namespace fsdp::optim {

/// The tensors that a step reads and writes. Entry i of each list belongs to the i-th part of a parameter. Entries may differ in dtype and
/// device.
struct StepTensors {
  std::vector<at::Tensor> values;
  std::vector<at::Tensor> gradients;            ///< The gradients, of any floating-point dtype.
  std::vector<std::vector<at::Tensor>> states;  ///< The states as [kind][entry], each like its value.
  std::vector<at::Tensor> steps;  ///< 0-D: the number of updates, this one included. Empty if the algorithm does not count them.
  at::Tensor grad_scale;          ///< If defined, gradients are divided by it first, in place.
  at::Tensor found_inf;           ///< If defined, and 1 on the device that the entries are on, nothing changes. Not in a first step of SGD.
};

struct AdamStep {
  double lr = 0;
  double beta1 = 0;
  double beta2 = 0;
  double weight_decay = 0;
  double eps = 0;
  bool decoupled = true;  ///< Whether weight decay works as in AdamW; otherwise it is added to the gradient.
  bool amsgrad = false;   ///< Whether there is a third kind of state, the largest second moment so far.
  bool maximize = false;
};

struct SGDStep {
  double lr = 0;
  double momentum = 0;  ///< If not 0, there is one kind of state.
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;
  bool maximize = false;
  bool is_first = false;  ///< Whether this is the first step: the momentum is not read, and becomes the gradient.
};

/// One step by ATen's fused kernels: the same bits as torch.optim's with fused=True on the same tensors.
void step_adam(const StepTensors& tensors, const AdamStep& step);
void step_sgd(const StepTensors& tensors, const SGDStep& step);

/// Adds 1 to each number of updates, unless `found_inf` is defined and 1. If it is defined, all tensors are on its device.
void count_step(std::span<const at::Tensor> steps, const at::Tensor& found_inf = {});

}  // namespace fsdp::optim
