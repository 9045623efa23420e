#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

namespace fsdp::trigger {

/// Takes a leaf's accumulated gradient away, and gives it to `deliver` (a function of one tensor). Owned by the leaf, whose `grad` stays
/// undefined.
template <typename Deliver>
class GradientHook final : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit GradientHook(Deliver deliver) : deliver_(std::move(deliver)) {}

  void operator()(const torch::autograd::Variable& leaf) override {
    // Taken first: a gradient that is refused must not stay, to be added to the next one.
    auto gradient = std::exchange(leaf.mutable_grad(), at::Tensor());
    if (gradient.defined()) deliver_(std::move(gradient));  // else a checkpoint's backward has delivered it already
  }

 private:
  Deliver deliver_;
};

}  // namespace fsdp::trigger
