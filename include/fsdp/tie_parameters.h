#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

namespace fsdp {

/// Ties a parameter to another one: `module` registers `target` where it had registered `parameter`, and `parameter`, a member of the
/// module, becomes the same tensor. Before fully_shard; inside of deferred_init, too:
///
///     fsdp::tie_parameters(*head, head->weight, embedding->weight);
///
/// An assignment alone (`head->weight = embedding->weight`) leaves the old tensor registered: sharded, gathered and never used. Throws
/// Error if `module` itself does not register `parameter`, if the two differ in shape, dtype or device, or if one of them is sharded.
void tie_parameters(torch::nn::Module& module, at::Tensor& parameter, const at::Tensor& target);

}  // namespace fsdp
