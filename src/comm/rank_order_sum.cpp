#include "comm/rank_order_sum.h"

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <array>
#include <bit>
#include <string>
#include <type_traits>
#include <vector>

#include "base/parallel_for.h"
#include "comm/device_sums.h"
#include "comm/sum_arithmetic.h"
#include "comm/sum_launches.h"
#include "fsdp/error.h"

// Declares that no iteration of the following loop reads data that another one writes.
#if defined(__clang__)
#define FSDP_INDEPENDENT_ITERATIONS _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define FSDP_INDEPENDENT_ITERATIONS _Pragma("GCC ivdep")
#else
#define FSDP_INDEPENDENT_ITERATIONS
#endif

namespace fsdp::comm {
namespace {

// Sums of one chunk stay in the first-level cache while all sources are added to it.
constexpr std::int64_t kChunk = 2048;

// The number of elements whose addition takes longer than waking a thread.
constexpr std::int64_t kWorthAThread = 64 * kChunk;

/// How a sum ends, known to the compiler.
template <bool kAccumulates, Rounding kRounds>
struct End {
  static constexpr bool kAccumulate = kAccumulates;
  static constexpr Rounding kRounding = kRounds;
};
using Plain = End<false, Rounding::kNone>;

// out = scale * a, or scale * (a + b), in the precision of `Acc`. `out` may be one of the sources, but then element by element.
template <typename E, typename Acc, typename A, typename Out>
void scale_one(const A* a, Out* out, std::int64_t n, Acc scale) {
  FSDP_INDEPENDENT_ITERATIONS
  for (std::int64_t i = 0; i < n; ++i) out[i] = finish(static_cast<Acc>(a[i]), scale, out[i], E::kAccumulate, E::kRounding);
}

template <typename E, typename Acc, typename A, typename B, typename Out>
void add_two(const A* a, const B* b, Out* out, std::int64_t n, Acc scale) {
  FSDP_INDEPENDENT_ITERATIONS
  for (std::int64_t i = 0; i < n; ++i)
    out[i] = finish(static_cast<Acc>(a[i]) + static_cast<Acc>(b[i]), scale, out[i], E::kAccumulate, E::kRounding);
}

// The sources [begin, begin + count) of one chunk, added pairwise: the larger half, a power of two, on the left. `sums` has a chunk for
// each level of the tree.
template <typename Source, typename Acc>
void add_tree(std::span<const void* const> sources, std::int64_t offset, Acc* sums, std::int64_t n) {
  const auto source = [&](std::size_t rank) { return static_cast<const Source*>(sources[rank]) + offset; };
  if (sources.size() == 1) return scale_one<Plain>(source(0), sums, n, Acc{1});
  if (sources.size() == 2) return add_two<Plain>(source(0), source(1), sums, n, Acc{1});
  const std::size_t left = std::bit_floor(sources.size() - 1);
  add_tree<Source>(sources.first(left), offset, sums, n);
  add_tree<Source>(sources.subspan(left), offset, sums + kChunk, n);
  add_two<Plain>(sums, sums + kChunk, sums, n, Acc{1});
}

// The elements [first, last).
template <typename E, typename Source, typename Out>
void sum_range(std::span<const void* const> sources, Out* out, std::int64_t first, std::int64_t last, double scale) {
  using Acc = Accumulator<Source>;
  const auto last_scale = static_cast<Acc>(scale);
  const auto source = [&](std::size_t rank) { return static_cast<const Source*>(sources[rank]) + first; };
  if (sources.size() == 1) return scale_one<E>(source(0), out + first, last - first, last_scale);
  if (sources.size() == 2) return add_two<E>(source(0), source(1), out + first, last - first, last_scale);
  const std::size_t left = std::bit_floor(sources.size() - 1);
  const auto levels = static_cast<std::size_t>(std::bit_width(sources.size()));
  std::vector<Acc> sums((levels + 1) * kChunk);
  Acc* const right = sums.data() + kChunk;
  for (std::int64_t begin = first; begin < last; begin += kChunk) {
    const std::int64_t n = std::min(kChunk, last - begin);
    // The left half's levels are done, and their chunks free, when the right half begins.
    add_tree<Source>(sources.first(left), begin, sums.data(), n);
    add_tree<Source>(sources.subspan(left), begin, right, n);
    add_two<E>(sums.data(), right, out + begin, n, last_scale);
  }
}

template <typename E, typename Source, typename Out>
void sum(std::span<const void* const> sources, Out* out, std::int64_t numel, double scale) {
  parallel_for(numel, kWorthAThread,
               [&](std::int64_t first, std::int64_t last) { sum_range<E, Source>(sources, out, first, last, scale); });
}

/// A sum with sources that are null: chunk by chunk, with zeros in their place.
void sum_with_zeros(std::span<const void* const> sources, at::ScalarType source_dtype, void* out, at::ScalarType out_dtype,
                    std::int64_t numel, const SumEnd& end) {
  static constexpr std::array<double, kChunk> kZeros{};
  parallel_for(numel, kWorthAThread, [&](std::int64_t first, std::int64_t last) {
    std::vector<const void*> chunk(sources.size());
    for (std::int64_t begin = first; begin < last; begin += kChunk) {
      const auto offset = [begin](at::ScalarType dtype) { return begin * static_cast<std::int64_t>(elementSize(dtype)); };
      for (std::size_t k = 0; k < sources.size(); ++k) {
        chunk[k] = kZeros.data();
        if (sources[k] != nullptr) chunk[k] = static_cast<const char*>(sources[k]) + offset(source_dtype);
      }
      rank_order_sum(chunk, source_dtype, static_cast<char*>(out) + offset(out_dtype), out_dtype, std::min(kChunk, last - begin), end);
    }
  });
}

/// By what is rounded in the end: nothing where the output has no more digits than that.
template <bool kAccumulate, typename Source, typename Out>
void sum_rounded(std::span<const void* const> sources, Out* out, std::int64_t numel, double scale, Rounding rounding) {
  if constexpr (!std::is_same_v<Source, double> && !std::is_same_v<Out, c10::BFloat16> && !std::is_same_v<Out, c10::Half>) {
    if (rounding == Rounding::kBFloat16) return sum<End<kAccumulate, Rounding::kBFloat16>, Source>(sources, out, numel, scale);
    if (rounding == Rounding::kHalf) return sum<End<kAccumulate, Rounding::kHalf>, Source>(sources, out, numel, scale);
  }
  sum<End<kAccumulate, Rounding::kNone>, Source>(sources, out, numel, scale);
}

}  // namespace

void check_summable(at::ScalarType dtype) {
  if (dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kHalf) return;
  throw Error(std::string("gradients of dtype ") + c10::toString(dtype) +
              " can't be reduced; use float32, float64, bfloat16 or float16 (MixedPrecision's reduce dtype)");
}

Rounding rounding_of(at::ScalarType source, at::ScalarType out, const SumEnd& end) {
  if (source == at::kDouble || (out != at::kFloat && out != at::kDouble)) return Rounding::kNone;
  if (end.rounded == at::kBFloat16) return Rounding::kBFloat16;
  return end.rounded == at::kHalf ? Rounding::kHalf : Rounding::kNone;
}

bool changes_nothing(at::ScalarType source, at::ScalarType out, const SumEnd& end) {
  return source == out && end.scale == 1.0 && !end.accumulate && rounding_of(source, out, end) == Rounding::kNone;
}

SumEnd sum_end(const ReducePart& part, double scale) {
  const auto rounded = part.rounded ? part.unreduced.scalar_type() : at::ScalarType::Undefined;
  return {.scale = scale, .rounded = rounded, .accumulate = part.accumulate};
}

void rank_order_sum(std::span<const void* const> sources, at::ScalarType source_dtype, void* out, at::ScalarType out_dtype,
                    std::int64_t numel, const SumEnd& end) {
  check_summable(source_dtype);
  check_summable(out_dtype);
  if (std::find(sources.begin(), sources.end(), nullptr) != sources.end()) {
    return sum_with_zeros(sources, source_dtype, out, out_dtype, numel, end);
  }
  const auto rounding = rounding_of(source_dtype, out_dtype, end);
  if (sources.size() == 1 && sources.front() == out && changes_nothing(source_dtype, out_dtype, end)) return;
  with_real_type(source_dtype, [&](auto source) {
    with_real_type(out_dtype, [&](auto target) {
      auto* typed_out = static_cast<decltype(target)*>(out);
      if (end.accumulate) {
        sum_rounded<true, decltype(source)>(sources, typed_out, numel, end.scale, rounding);
      } else {
        sum_rounded<false, decltype(source)>(sources, typed_out, numel, end.scale, rounding);
      }
    });
  });
}

void rank_order_sum(std::span<const at::Tensor> sources, const at::Tensor& out, const SumEnd& end) {
  if (!out.is_cpu()) {
    const RankOrderSum sum{.sources = {sources.begin(), sources.end()}, .out = out, .end = end};
    return rank_order_sums({&sum, 1});
  }
  c10::SmallVector<const void*, 16> pointers;
  for (const at::Tensor& source : sources) pointers.push_back(source.const_data_ptr());
  rank_order_sum({pointers.data(), pointers.size()}, sources.front().scalar_type(), out.mutable_data_ptr(), out.scalar_type(), out.numel(),
                 end);
}

void rank_order_sums(std::span<const RankOrderSum> sums) {
  std::vector<RankOrderSum> by_operators;
  DeviceSums by_kernel;
  for (const RankOrderSum& sum : sums) {
    if (sum.out.is_cpu()) {
      rank_order_sum(sum.sources, sum.out, sum.end);
    } else if (!by_kernel.add(sum)) {
      by_operators.push_back(sum);
    }
  }
  by_kernel.launch();
  sum_by_operators(by_operators);
}

}  // namespace fsdp::comm
