#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace fsdp::engine {

/// Sets all elements to zero. An operator is used only where memory is not the CPU's: for small tensors it costs more than its work.
void zero_bytes(const at::Tensor& tensor);

/// If copying `source` to `target` means copying its bytes, does that (see parallel_copy) and returns true. Otherwise returns false and
/// changes nothing. `target` is contiguous and does not overlap `source`. This takes less time than an operator.
bool copy_bytes(const at::Tensor& source, const at::Tensor& target);

/// How many elements of a parameter represent its initial values where ranks compare these unasked.
inline constexpr std::int64_t kSampledElements = 64;

/// Returns a checksum of the bytes of a tensor, in the order of its elements. Tensors with equal checksums have equal bytes, except with a
/// probability of 2^-64. It is never 0. With `elements`, only about that many elements, spread over the tensor, are summed; 0 stands for
/// all.
std::int64_t checksum(const at::Tensor& tensor, std::int64_t elements = 0);

}  // namespace fsdp::engine
