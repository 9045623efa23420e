#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

namespace fsdp {

/// Ties a parameter to another one. `module` registers `target` in place of `parameter`, and `parameter`, which is a member of the module,
/// becomes the same tensor. Call it before fully_shard. It works inside of deferred_init, too:
///
///     fsdp::tie_parameters(*head, head->weight, embedding->weight);
///
/// An assignment alone (`head->weight = embedding->weight`) leaves the old tensor registered, which would be sharded and gathered but never
/// used. Throws Error if `module` itself does not register `parameter`, if the two differ in shape, dtype or device, or if one of them is
/// sharded.
void tie_parameters(torch::nn::Module& module, at::Tensor& parameter, const at::Tensor& target);

}  // namespace fsdp
