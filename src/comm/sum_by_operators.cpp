#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <bit>
#include <utility>

#include "comm/parts.h"
#include "comm/rank_order_sum.h"

namespace fsdp::comm {
namespace {

void add_up(std::span<const at::Tensor> sources, const at::Tensor& total) {
  if (sources.size() <= 2) {
    total.copy_(sources.front());
    if (sources.size() == 2) total.add_(sources.back());
    return;
  }
  const std::size_t left = std::bit_floor(sources.size() - 1);
  add_up(sources.first(left), total);
  const auto right = at::empty_like(total);
  add_up(sources.subspan(left), right);
  total.add_(right);
}

/// The sources lie one after the other.
bool are_rows(std::span<const at::Tensor> sources) {
  const auto* next = static_cast<const char*>(sources.front().const_data_ptr());
  for (const auto& source : sources) {
    if (source.const_data_ptr() != next || !source.is_contiguous()) return false;
    next += source.nbytes();
  }
  return true;
}

/// total = the sources' sum. It has the sum's dtype, and is none of them.
void sum_in_rank_order(std::span<const at::Tensor> sources, const at::Tensor& total) {
  const auto count = static_cast<std::int64_t>(sources.size());
  if (!std::has_single_bit(sources.size()) || count == 1 || !total.is_contiguous() || !are_rows(sources)) return add_up(sources, total);
  // It computes the same tree, a level at a time, with few kernels that read each term once.
  const auto numel = total.numel();
  auto rows = sources.front().as_strided({count, numel}, {numel, 1});
  while (rows.size(0) > 2) rows = at::sum(rows.view({rows.size(0) / 2, 2, numel}), at::IntArrayRef{1}, false, total.scalar_type());
  auto flat = total.view({numel});
  at::sum_out(flat, rows, at::IntArrayRef{0}, false, total.scalar_type());
}

/// The sources' sum, in the output itself if it can be made there.
at::Tensor total_of(const RankOrderSum& sum) {
  const auto precise = sum_dtype(sum.sources.front().scalar_type());
  const auto is_free = [&](const at::Tensor& source) { return !overlaps(source, sum.out); };
  const bool in_place =
      !sum.end.accumulate && sum.out.scalar_type() == precise && std::all_of(sum.sources.begin(), sum.sources.end(), is_free);
  const auto total = in_place ? sum.out : at::empty(sum.out.sizes(), sum.out.options().dtype(precise));
  sum_in_rank_order(sum.sources, total);
  return total;
}

/// Sums whose ends are alike, so that a kernel each does for all.
struct Ends {
  SumEnd end;
  Rounding rounding = Rounding::kNone;
  bool is_there = false;     ///< Each sum is its output.
  bool is_borrowed = false;  ///< Each sum is a source, which keeps its values.
  std::vector<at::Tensor> sums = {};
  std::vector<at::Tensor> outs = {};

  bool fit(const Ends& other) const {
    return other.end.scale == end.scale && other.end.accumulate == end.accumulate && other.rounding == rounding &&
           other.is_there == is_there && other.is_borrowed == is_borrowed &&
           other.sums.front().scalar_type() == sums.front().scalar_type() && other.outs.front().scalar_type() == outs.front().scalar_type();
  }

  /// Rounds as the fused pass does: after scaling, if it asks for that, and after adding.
  void make() {
    if (end.scale != 1.0 && is_borrowed) {
      sums = at::_foreach_mul(sums, end.scale);
    } else if (end.scale != 1.0) {
      at::_foreach_mul_(sums, end.scale);
    }
    if (rounding != Rounding::kNone) {
      std::vector<at::Tensor> rounded;
      for (const auto& sum : sums) rounded.push_back(at::empty(sum.sizes(), sum.options().dtype(end.rounded)));
      at::_foreach_copy_(rounded, sums);
      sums = std::move(rounded);
      is_there = false;
    }
    if (is_there) return;
    end.accumulate ? at::_foreach_add_(outs, sums) : at::_foreach_copy_(outs, sums);
  }
};

}  // namespace

void sum_by_operators(std::span<const RankOrderSum> sums) {
  const at::NoGradGuard no_grad;
  std::vector<Ends> groups;
  for (const RankOrderSum& sum : sums) {
    if (sum.out.numel() == 0) continue;
    const auto dtype = sum.sources.front().scalar_type();
    check_summable(dtype);
    Ends ends{.end = sum.end, .rounding = rounding_of(dtype, sum.out.scalar_type(), sum.end)};
    // The backend's sum, or what a rank has that is alone.
    const bool is_one = sum.sources.size() == 1 && (sum.end.scale == 1.0 || dtype == sum_dtype(dtype));
    if (is_one && sum.end.scale == 1.0 && dtype == sum.end.rounded) ends.rounding = Rounding::kNone;
    ends.sums = {is_one ? sum.sources.front() : total_of(sum)};
    ends.outs = {sum.out};
    ends.is_there = !sum.end.accumulate && ends.sums.front().const_data_ptr() == sum.out.const_data_ptr() &&
                    ends.sums.front().scalar_type() == sum.out.scalar_type();
    ends.is_borrowed = is_one && !ends.is_there;
    const auto found = std::find_if(groups.begin(), groups.end(), [&](const Ends& group) { return group.fit(ends); });
    if (found == groups.end()) {
      groups.push_back(std::move(ends));
    } else {
      found->sums.push_back(ends.sums.front());
      found->outs.push_back(sum.out);
    }
  }
  for (Ends& group : groups) group.make();
}

}  // namespace fsdp::comm
