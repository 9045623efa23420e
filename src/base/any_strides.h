#pragma once

#include <ATen/core/Tensor.h>

// Tensors of users, such as buffers: transposed, channels-last, expanded, lazily conjugated.
namespace fsdp {

/// The values, dense in row-major order: the tensor itself if it is so.
at::Tensor row_major(const at::Tensor& tensor);

/// Gives `to` these values, of its sizes. Where several of its elements share memory (expanded) and `values` differ there, it gets memory
/// of its own in place of what it had, as torch::load gives it.
void assign_values(const at::Tensor& to, const at::Tensor& values);

}  // namespace fsdp
