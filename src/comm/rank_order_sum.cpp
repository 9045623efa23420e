#include "comm/rank_order_sum.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/sum.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <bit>
#include <string>
#include <type_traits>
#include <vector>

#include "base/parallel_for.h"
#include "fsdp/error.h"

// Says of the loop that follows that no iteration reads what another one writes.
#if defined(__clang__)
#define FSDP_INDEPENDENT_ITERATIONS _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define FSDP_INDEPENDENT_ITERATIONS _Pragma("GCC ivdep")
#else
#define FSDP_INDEPENDENT_ITERATIONS
#endif

namespace fsdp::comm {
namespace {

template <typename Source>
using Accumulator = std::conditional_t<std::is_same_v<Source, double>, double, float>;

// Sums of one chunk stay in the first-level cache while all sources are added to it.
constexpr std::int64_t kChunk = 2048;

// So many elements take longer to add than a thread to wake up.
constexpr std::int64_t kWorthAThread = 64 * kChunk;

// Unlike c10's, without a branch, so that the loops vectorize.
template <typename T, typename Acc>
inline T store(Acc value) {
  if constexpr (std::is_same_v<T, c10::BFloat16>) {
    const float narrow = static_cast<float>(value);
    const auto bits = std::bit_cast<std::uint32_t>(narrow);
    const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return c10::BFloat16(static_cast<std::uint16_t>(narrow == narrow ? rounded : 0x7fc0u), c10::BFloat16::from_bits());
  } else {
    return static_cast<T>(value);
  }
}

template <bool kAccumulate, typename Out, typename Acc>
inline Out finish(Acc sum, Acc scale, Out old) {
  const Acc scaled = sum * scale;
  if constexpr (kAccumulate) {
    // In the wider of both types: a main gradient in fp64 keeps its digits.
    using Wide = decltype(Acc{} + Accumulator<Out>{});
    return store<Out>(static_cast<Wide>(old) + static_cast<Wide>(scaled));
  } else {
    return store<Out>(scaled);
  }
}

// out = scale * a, or scale * (a + b), in the precision of `Acc`. `out` may be one of the sources, but then element by element.
template <bool kAccumulate, typename Acc, typename A, typename Out>
void scale_one(const A* a, Out* out, std::int64_t n, Acc scale) {
  FSDP_INDEPENDENT_ITERATIONS
  for (std::int64_t i = 0; i < n; ++i) out[i] = finish<kAccumulate>(static_cast<Acc>(a[i]), scale, out[i]);
}

template <bool kAccumulate, typename Acc, typename A, typename B, typename Out>
void add_two(const A* a, const B* b, Out* out, std::int64_t n, Acc scale) {
  FSDP_INDEPENDENT_ITERATIONS
  for (std::int64_t i = 0; i < n; ++i) out[i] = finish<kAccumulate>(static_cast<Acc>(a[i]) + static_cast<Acc>(b[i]), scale, out[i]);
}

// The sources [begin, begin + count) of one chunk, added pairwise: the larger half, a power of two, on the left. `sums` has a chunk for
// each level of the tree.
template <typename Source, typename Acc>
void add_tree(std::span<const void* const> sources, std::int64_t offset, Acc* sums, std::int64_t n) {
  const auto source = [&](std::size_t rank) { return static_cast<const Source*>(sources[rank]) + offset; };
  if (sources.size() == 1) return scale_one<false>(source(0), sums, n, Acc{1});
  if (sources.size() == 2) return add_two<false>(source(0), source(1), sums, n, Acc{1});
  const std::size_t left = std::bit_floor(sources.size() - 1);
  add_tree<Source>(sources.first(left), offset, sums, n);
  add_tree<Source>(sources.subspan(left), offset, sums + kChunk, n);
  add_two<false>(sums, sums + kChunk, sums, n, Acc{1});
}

// The elements [first, last).
template <bool kAccumulate, typename Source, typename Out>
void sum_range(std::span<const void* const> sources, Out* out, std::int64_t first, std::int64_t last, double scale) {
  using Acc = Accumulator<Source>;
  const auto last_scale = static_cast<Acc>(scale);
  const auto source = [&](std::size_t rank) { return static_cast<const Source*>(sources[rank]) + first; };
  if (sources.size() == 1) return scale_one<kAccumulate>(source(0), out + first, last - first, last_scale);
  if (sources.size() == 2) return add_two<kAccumulate>(source(0), source(1), out + first, last - first, last_scale);
  const std::size_t left = std::bit_floor(sources.size() - 1);
  const auto levels = static_cast<std::size_t>(std::bit_width(sources.size()));
  std::vector<Acc> sums((levels + 1) * kChunk);
  Acc* const right = sums.data() + kChunk;
  for (std::int64_t begin = first; begin < last; begin += kChunk) {
    const std::int64_t n = std::min(kChunk, last - begin);
    // The left half's levels are done, and their chunks free, when the right half begins.
    add_tree<Source>(sources.first(left), begin, sums.data(), n);
    add_tree<Source>(sources.subspan(left), begin, right, n);
    add_two<kAccumulate>(sums.data(), right, out + begin, n, last_scale);
  }
}

template <bool kAccumulate, typename Source, typename Out>
void sum(std::span<const void* const> sources, Out* out, std::int64_t numel, double scale) {
  parallel_for(numel, kWorthAThread,
               [&](std::int64_t first, std::int64_t last) { sum_range<kAccumulate, Source>(sources, out, first, last, scale); });
}

// Calls fn with a value of the C++ type of a summable dtype.
template <typename Fn>
void with_type(at::ScalarType dtype, const Fn& fn) {
  check_summable(dtype);
  switch (dtype) {
    case at::kFloat:
      return fn(float{});
    case at::kDouble:
      return fn(double{});
    case at::kBFloat16:
      return fn(c10::BFloat16{});
    default:
      return fn(c10::Half{});
  }
}

}  // namespace

void check_summable(at::ScalarType dtype) {
  if (dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kHalf) return;
  throw Error(std::string("gradients of dtype ") + c10::toString(dtype) +
              " can't be reduced; use float32, float64, bfloat16 or float16 (MixedPrecision's reduce dtype)");
}

void rank_order_sum(std::span<const void* const> sources, at::ScalarType source_dtype, void* out, at::ScalarType out_dtype,
                    std::int64_t numel, double scale, bool accumulate) {
  if (sources.size() == 1 && sources.front() == out && source_dtype == out_dtype && scale == 1.0 && !accumulate) return;
  with_type(source_dtype, [&](auto source) {
    with_type(out_dtype, [&](auto target) {
      auto* typed_out = static_cast<decltype(target)*>(out);
      if (accumulate) {
        sum<true, decltype(source)>(sources, typed_out, numel, scale);
      } else {
        sum<false, decltype(source)>(sources, typed_out, numel, scale);
      }
    });
  });
}

void rank_order_sum(std::span<const at::Tensor> sources, const at::Tensor& out, double scale, bool accumulate) {
  if (!out.is_cpu()) return rank_order_sum_by_operators(sources, out, scale, accumulate);
  c10::SmallVector<const void*, 16> pointers;
  for (const at::Tensor& source : sources) pointers.push_back(source.const_data_ptr());
  rank_order_sum({pointers.data(), pointers.size()}, sources.front().scalar_type(), out.mutable_data_ptr(), out.scalar_type(), out.numel(),
                 scale, accumulate);
}

static void add_tree(std::span<const at::Tensor> sources, const at::Tensor& total) {
  if (sources.size() <= 2) {
    total.copy_(sources.front());
    if (sources.size() == 2) total.add_(sources.back());
    return;
  }
  const std::size_t left = std::bit_floor(sources.size() - 1);
  add_tree(sources.first(left), total);
  const auto right = at::empty_like(total);
  add_tree(sources.subspan(left), right);
  total.add_(right);
}

/// The sources lie one after the other.
static bool are_rows(std::span<const at::Tensor> sources) {
  const auto* next = static_cast<const char*>(sources.front().const_data_ptr());
  for (const auto& source : sources) {
    if (source.const_data_ptr() != next || !source.is_contiguous()) return false;
    next += source.nbytes();
  }
  return true;
}

void sum_in_rank_order(std::span<const at::Tensor> sources, const at::Tensor& total) {
  const auto count = static_cast<std::int64_t>(sources.size());
  if (!std::has_single_bit(sources.size()) || count == 1 || !total.is_contiguous() || !are_rows(sources)) return add_tree(sources, total);
  // The same tree, a level at a time: few kernels, and each reads what it adds up once.
  const auto numel = total.numel();
  auto rows = sources.front().as_strided({count, numel}, {numel, 1});
  while (rows.size(0) > 2) rows = at::sum(rows.view({rows.size(0) / 2, 2, numel}), at::IntArrayRef{1}, false, total.scalar_type());
  auto flat = total.view({numel});
  at::sum_out(flat, rows, at::IntArrayRef{0}, false, total.scalar_type());
}

void rank_order_sum_by_operators(std::span<const at::Tensor> sources, const at::Tensor& out, double scale, bool accumulate) {
  const at::NoGradGuard no_grad;
  const at::ScalarType dtype = sources.front().scalar_type();
  check_summable(dtype);
  const at::ScalarType precise = sum_dtype(dtype);
  const auto is_out = [&](const at::Tensor& source) { return source.const_data_ptr() == out.const_data_ptr(); };
  if (sources.size() == 1 && scale == 1.0) {  // A rank that is alone.
    if (accumulate) {
      at::Tensor(out).add_(sources.front());
    } else if (!is_out(sources.front()) || out.scalar_type() != dtype) {
      out.copy_(sources.front());
    }
    return;
  }
  const bool in_place = !accumulate && out.scalar_type() == precise && std::none_of(sources.begin(), sources.end(), is_out);
  at::Tensor total = in_place ? out : at::empty(out.sizes(), out.options().dtype(precise));
  sum_in_rank_order(sources, total);
  // Not add_(total, scale): that would round once where the other implementation rounds twice.
  if (scale != 1.0) total.mul_(scale);
  if (accumulate) {
    at::Tensor(out).add_(total);
  } else if (!in_place) {
    out.copy_(total);
  }
}

}  // namespace fsdp::comm
