#pragma once

#include <ATen/core/Tensor.h>

// Helpers for tensors of users, such as buffers, which may be transposed, channels-last, expanded or lazily conjugated.
namespace fsdp {

/// Returns the values, dense in row-major order. Returns the tensor itself if its memory is laid out in this way.
at::Tensor row_major(const at::Tensor& tensor);

/// Copies `values`, which have the sizes of `to`, into `to`. If elements of `to` share memory (an expanded tensor) but get different
/// values, `to` first gets new memory of its own, as it does in torch::load.
void assign_values(const at::Tensor& to, const at::Tensor& values);

}  // namespace fsdp
