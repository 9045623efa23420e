#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

namespace fsdp {

/// Returns a contiguous tensor over memory at `bytes`. Its storage begins there and holds nothing else, so code that copies or saves a
/// tensor by its storage takes only the tensor. `release` keeps the memory alive until the tensor is destroyed. `bytes` may be null if the
/// tensor is empty.
at::Tensor tensor_over(void* bytes, at::IntArrayRef shape, const at::TensorOptions& options, const std::function<void(void*)>& release);

}  // namespace fsdp
