#pragma once

#include <cstdint>
#include <type_traits>

#include "base/element.h"
#include "base/host_device.h"

// The arithmetic of one element of a sum in rank order, of the loop on the CPU and of a kernel alike. No products are added in one step:
// both are compiled so that they don't (-ffp-contract=off, --fmad=false).
namespace fsdp::comm {

/// The type in which a sum is computed.
template <typename Source>
using Accumulator = std::conditional_t<std::is_same_v<Source, double>, double, float>;

/// The type to which a sum is rounded before it is stored or added.
enum class Rounding : std::uint8_t { kNone, kBFloat16, kHalf };

template <typename Acc>
FSDP_ELEMENT Acc round_to(Rounding rounding, Acc value) {
  switch (rounding) {
    case Rounding::kBFloat16:
      return static_cast<Acc>(static_cast<float>(rounded_to<c10::BFloat16>(value)));
    case Rounding::kHalf:
      return static_cast<Acc>(static_cast<float>(rounded_to<c10::Half>(static_cast<float>(value))));
    case Rounding::kNone:
      break;
  }
  return value;
}

/// Returns the new value of `old`, the output's element, for the sum of the ranks' elements.
template <typename Out, typename Acc>
FSDP_ELEMENT Out finish(Acc sum, Acc scale, Out old, bool accumulate, Rounding rounding) {
  const Acc scaled = round_to(rounding, sum * scale);
  // In the wider of both types: a main gradient in fp64 keeps its digits.
  using Wide = decltype(Acc{} + Accumulator<Out>{});
  return accumulate ? rounded_to<Out>(static_cast<Wide>(old) + static_cast<Wide>(scaled)) : rounded_to<Out>(scaled);
}

/// Neighbouring elements that are processed together.
template <typename T, int kCount>
struct Lanes {
  T values[kCount];
};

template <typename T, int kCount>
FSDP_HOST_DEVICE inline Lanes<T, kCount> operator+(Lanes<T, kCount> a, const Lanes<T, kCount>& b) {
  FSDP_UNROLL
  for (int lane = 0; lane < kCount; ++lane) a.values[lane] = a.values[lane] + b.values[lane];
  return a;
}

/// Terms that are read before they are added up, and their largest number.
inline constexpr int kTogether = 8;
inline constexpr int kMostTerms = 1 << 12;

/// load(first), load(first + 1), ..., of which there are `count`, added up pairwise. -0 takes the place of those that are missing: nothing
/// changes by adding it.
template <typename Terms, typename Load>
FSDP_HOST_DEVICE inline Terms sum_together(int first, int count, const Load& load) {
  Terms terms[kTogether];
  FSDP_UNROLL
  for (int k = 0; k < kTogether; ++k) {
    if (first + k < count) {
      terms[k] = load(first + k);
    } else {
      for (auto& value : terms[k].values) value = -0.0F;
    }
  }
  FSDP_UNROLL
  for (int half = 1; half < kTogether; half *= 2) {
    FSDP_UNROLL
    for (int k = 0; k < kTogether; k += 2 * half) terms[k] = terms[k] + terms[k + half];
  }
  return terms[0];
}

/// load(0) + load(1) + ..., pairwise in their order, the left operand a power of two of them. More than kTogether as a binary counter adds
/// up: bit l of their number is set where level l has a sum of 2^l times kTogether.
template <typename Terms, typename Load>
FSDP_HOST_DEVICE inline Terms pairwise_sum(int count, const Load& load) {
  if (count <= kTogether) return sum_together<Terms>(0, count, load);
  constexpr int kLevels = 10;
  static_assert((kTogether << (kLevels - 1)) >= kMostTerms);
  Terms levels[kLevels];
  int number = 0;
  for (int first = 0; first < count; first += kTogether, ++number) {
    auto sum = sum_together<Terms>(first, count, load);
    int level = 0;
    for (; ((number >> level) & 1) != 0; ++level) sum = levels[level] + sum;
    levels[level] = sum;
  }
  int level = 0;
  while (((number >> level) & 1) == 0) ++level;
  auto sum = levels[level];
  for (++level; level < kLevels; ++level) {
    if (((number >> level) & 1) != 0) sum = levels[level] + sum;
  }
  return sum;
}

}  // namespace fsdp::comm
