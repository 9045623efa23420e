#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

namespace fsdp {

/// A contiguous tensor over memory at `bytes`, with a storage of its own that begins there: code that copies or saves a tensor by its
/// storage takes nothing else along. `release` holds the memory, until the tensor goes. `bytes` may be null where the tensor is empty.
at::Tensor tensor_over(void* bytes, at::IntArrayRef shape, const at::TensorOptions& options, const std::function<void(void*)>& release);

}  // namespace fsdp
