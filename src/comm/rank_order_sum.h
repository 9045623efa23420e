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

/// What is done with a sum, in this order.
struct SumEnd {
  double scale = 1;  ///< It is multiplied by this, in its precision.
  /// If it is one of bfloat16 and half: the sum is rounded to it, where both it and the output have more digits.
  at::ScalarType rounded = at::ScalarType::Undefined;
  bool accumulate = false;  ///< The output's old value is added.
};
Rounding rounding_of(at::ScalarType source, at::ScalarType out, const SumEnd& end);
/// What is summed is one source, which already lies where the output is to be.
bool changes_nothing(at::ScalarType source, at::ScalarType out, const SumEnd& end);
/// Returns the end of the sum that a part of a reduce-scatter asks for.
SumEnd sum_end(const ReducePart& part, double scale);

/// [Reduce in full precision] out = scale * (sources[0] + sources[1] + ...), with all that `end` says. The sum runs in fp32 (fp64 for
/// double sources), pairwise in the order of the sources: ((0 + 1) + (2 + 3)) + ..., the left operand a power of two of them. So a sum over
/// the rows of a mesh and then over the rows' sums is the same bits as one over all ranks, where rows have a power of two of ranks. It is
/// multiplied in that precision by `scale` (rounded to fp32 for an fp32 sum); each element of `out` is rounded at the end. All 1-D,
/// contiguous, of equal length; sources of one dtype; `out` may be of another, and may be one of the sources.
struct RankOrderSum {
  static constexpr std::int64_t kNone = -1;

  std::vector<at::Tensor> sources;
  at::Tensor out;
  SumEnd end = {};
  /// The one of the sources that lies apart, because this rank has made it itself. The others follow each other at equal distances, where
  /// they have arrived. If they do not, operators make the sum.
  std::int64_t apart = kNone;
};

/// On the CPU one fused pass each without temporary tensors, on torch's intra-op threads, of which any number gives the same bits. On a
/// device with a kernel of ours (device_sums.h) one for all that are alike, else operators; on the current stream. The same bits
/// everywhere, but for the sign of zeros that operators give.
void rank_order_sums(std::span<const RankOrderSum> sums);
void rank_order_sum(std::span<const at::Tensor> sources, const at::Tensor& out, const SumEnd& end);

/// The same for raw memory on the CPU: each source points to `numel` elements of `source_dtype`.
void rank_order_sum(std::span<const void* const> sources, at::ScalarType source_dtype, void* out, at::ScalarType out_dtype,
                    std::int64_t numel, const SumEnd& end);

/// By tensor operators, for devices without a kernel of ours. Tensors of any shape, the same for all of a sum.
void sum_by_operators(std::span<const RankOrderSum> sums);

}  // namespace fsdp::comm
