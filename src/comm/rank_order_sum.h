#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

#include "comm/communicator.h"
#include "comm/sum_arithmetic.h"

namespace fsdp::comm {

/// Throws Error unless gradients of this dtype can be summed: float, double, bfloat16 or half.
void check_summable(at::ScalarType dtype);

/// The dtype in which gradients of this one are summed: double for double, else float.
constexpr at::ScalarType sum_dtype(at::ScalarType dtype) { return dtype == at::kDouble ? at::kDouble : at::kFloat; }

/// The operations on a sum, in this order.
struct SumEnd {
  double scale = 1;  ///< It is multiplied by this, in its precision.
  /// If it is bfloat16 or half, the sum is rounded to it, provided that both the sum and the output have more digits.
  at::ScalarType rounded = at::ScalarType::Undefined;
  bool accumulate = false;  ///< The output's old value is added.
};
Rounding rounding_of(at::ScalarType source, at::ScalarType out, const SumEnd& end);
/// True if the sum is of one source, which is the output already.
bool changes_nothing(at::ScalarType source, at::ScalarType out, const SumEnd& end);
/// Returns the operations on the sum for a part of a reduce-scatter.
SumEnd sum_end(const ReducePart& part, double scale);

/// [Reduce in full precision] out = scale * (sources[0] + sources[1] + ...), followed by the operations of `end`. The sum runs in fp32
/// (fp64 for double sources), pairwise in the order of the sources: ((0 + 1) + (2 + 3)) + ..., the left operand a power of two of them.
/// Sums over the rows of a mesh, summed over the other dimension, therefore have the bits of one sum over all ranks if a row has a power of
/// two of ranks. The sum is multiplied in its precision by `scale` (rounded to fp32 for an fp32 sum); each element of `out` is rounded at
/// the end. All 1-D, contiguous, of equal length; sources of one dtype; `out` may be of another, and may be one of the sources.
struct RankOrderSum {
  static constexpr std::int64_t kNone = -1;

  std::vector<at::Tensor> sources;
  at::Tensor out;
  SumEnd end = {};
  /// The source that lies apart, because this rank has computed it. The others lie at equal distances, in the buffer in which they arrived.
  /// If they do not, operators compute the sum.
  std::int64_t apart = kNone;
};

/// On the CPU, each sum is one fused pass without temporary tensors, on torch's intra-op threads; any number of threads gives the same
/// bits. On a device with a kernel of this library (device_sums.h), one launch computes all sums that are alike; otherwise operators
/// compute them. Both use the current stream. The bits are the same everywhere, except the sign of zeros that operators compute.
void rank_order_sums(std::span<const RankOrderSum> sums);
void rank_order_sum(std::span<const at::Tensor> sources, const at::Tensor& out, const SumEnd& end);

/// Computes a sum of raw memory on the CPU: each source points to `numel` elements of `source_dtype`, or is null and counts as zeros.
void rank_order_sum(std::span<const void* const> sources, at::ScalarType source_dtype, void* out, at::ScalarType out_dtype,
                    std::int64_t numel, const SumEnd& end);

/// Computes sums by tensor operators, for devices without a kernel of this library. Tensors may have any shape, which is the same for all
/// tensors of a sum.
void sum_by_operators(std::span<const RankOrderSum> sums);

}  // namespace fsdp::comm
