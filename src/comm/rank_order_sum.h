#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>

namespace fsdp::comm {

/// Throws Error unless gradients of this dtype can be summed: float, double, bfloat16 or half.
void check_summable(at::ScalarType dtype);

/// The dtype in which gradients of this one are summed: double for double, else float.
constexpr at::ScalarType sum_dtype(at::ScalarType dtype) { return dtype == at::kDouble ? at::kDouble : at::kFloat; }

/// out = scale * (sources[0] + sources[1] + ...), added to out's old value if `accumulate` [Reduce in full precision]. The sum runs in fp32
/// (fp64 for double sources), pairwise in the order of the sources: ((0 + 1) + (2 + 3)) + ..., the left operand a power of two of them. So
/// a sum over the rows of a mesh and then over the rows' sums is the same bits as one over all ranks, where rows have a power of two of
/// ranks. It is multiplied in that precision by `scale` (rounded to fp32 for an fp32 sum); each element of `out` is rounded at the end. All
/// 1-D, contiguous, of equal length; sources of one dtype; `out` may be of another, and may be one of the sources. On the CPU one fused
/// pass without temporary tensors, on torch's intra-op threads, of which any number gives the same bits; elsewhere operators on the current
/// stream.
void rank_order_sum(std::span<const at::Tensor> sources, const at::Tensor& out, double scale, bool accumulate);

/// The same for raw memory on the CPU: each source points to `numel` elements of `source_dtype`.
void rank_order_sum(std::span<const void* const> sources, at::ScalarType source_dtype, void* out, at::ScalarType out_dtype,
                    std::int64_t numel, double scale, bool accumulate);

/// total = sources[0] + sources[1] + ..., in the same order, by tensor operators: for devices without a fused pass of ours. `total` has the
/// sum's dtype, and is none of the sources. The same bits as above, but for the sign of zeros.
void sum_in_rank_order(std::span<const at::Tensor> sources, const at::Tensor& total);

/// The same as rank_order_sum by operators; tensors of any shape, the same for all.
void rank_order_sum_by_operators(std::span<const at::Tensor> sources, const at::Tensor& out, double scale, bool accumulate);

}  // namespace fsdp::comm
