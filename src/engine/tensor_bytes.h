#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace fsdp::engine {

/// Sets all elements to zero. An operator is used only where memory is not the CPU's: for small tensors it costs more than its work.
void zero_bytes(const at::Tensor& tensor);

/// Copies bytes (see parallel_copy) if that is all that copying `source` to `target` takes: false otherwise, and nothing has changed.
/// `target` is contiguous, and no part of `source`. This takes less time than an operator.
bool copy_bytes(const at::Tensor& source, const at::Tensor& target);

/// Of the bytes of a tensor, in the order of its elements: equal ones have equal bytes, but for one chance in 2^64. Never 0. `elements`: of
/// about so many, spread over it; 0: of all.
std::int64_t checksum(const at::Tensor& tensor, std::int64_t elements = 0);

}  // namespace fsdp::engine
