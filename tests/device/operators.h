#pragma once

#include <ATen/core/Tensor.h>

namespace sim {

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, at::ScalarType dtype, int device);
/// Another tensor over the same storage. It keeps the other dispatch keys, which subclasses of tensors in C++ are known by.
at::Tensor view_of(const at::Tensor& tensor, at::IntArrayRef size, at::IntArrayRef stride, std::int64_t offset);

}  // namespace sim
