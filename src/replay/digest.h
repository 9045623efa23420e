#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace fsdp::replay {

/// Returns a digest of the bytes of each of `pieces` equal parts of a 1-D contiguous tensor. A part with one bit flipped always has another
/// digest, and parts that differ otherwise have equal ones with a probability of about 2^-64. If the tensor is on a device, the device
/// computes it, and the host waits; digests of different types of devices are not comparable.
std::vector<std::int64_t> digests(const at::Tensor& tensor, std::int64_t pieces);

/// Returns the digest of the elements of any strided tensor in their order, as one part.
std::int64_t digest(const at::Tensor& tensor);

/// Adds the digest of a part, which stands at `position`, to that of a whole. The order of additions does not matter.
std::int64_t with_digest(std::int64_t whole, std::int64_t digest, std::size_t position);

}  // namespace fsdp::replay
