#pragma once

#include <ATen/core/Tensor.h>

namespace fsdp::engine {

/// Sets all elements to zero. An operator is used only where memory is not the CPU's: for small tensors it costs more than its work.
void zero_bytes(const at::Tensor& tensor);

/// Copies bytes (see parallel_copy) if that is all that copying `source` to `target` takes: false otherwise, and nothing has changed.
/// `target` is contiguous, and no part of `source`. This takes less time than an operator.
bool copy_bytes(const at::Tensor& source, const at::Tensor& target);

}  // namespace fsdp::engine
