// Plain loops that the compiler turns into vector instructions. Three things could keep the compiler from that. sqrt() may set errno, so
// this file is compiled with -fno-math-errno. Bytes may alias anything, hence the __restrict. Looking up codes in a table takes gather
// instructions, which x86 has from AVX2 on, so there are two versions. Neither uses fused multiply-add, so both give the same bits.

#include "optim/block_adamw.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace fsdp::optim {
namespace {

#if defined(__GNUC__)
#define FSDP_INLINE inline __attribute__((always_inline))
#else
#define FSDP_INLINE inline
#endif

FSDP_INLINE void decode(const BlockMoment& moment, std::int64_t numel, float* __restrict to) {
  const std::uint8_t* __restrict codes = moment.codes;
  const float largest = *moment.largest;
  for (std::int64_t i = 0; i < numel; ++i) to[i] = moment.map->decode(codes[i]) * largest;
}

FSDP_INLINE void encode(const BlockMoment& moment, std::int64_t numel, float* __restrict from) {
  std::fill(from + numel, from + kBlock, 0.0F);
  std::int32_t bits = 0;
  for (std::int64_t i = 0; i < kBlock; ++i) bits = std::max(bits, magnitude_bits(from[i]));
  const auto largest = std::bit_cast<float>(bits);
  *moment.largest = largest;
  const float divisor = divisor_for(largest);
  const DynamicMap& map = *moment.map;
  std::int32_t wide[kBlock];
  for (std::int64_t i = 0; i < kBlock; ++i) wide[i] = map.encode(from[i] / divisor);
  std::uint8_t* __restrict codes = moment.codes;
  for (std::int64_t i = 0; i < numel; ++i) codes[i] = static_cast<std::uint8_t>(wide[i]);
}

FSDP_INLINE void update(const BlockAdamW& adamw, const Block& gradient, Block& value, const BlockMoment& first_moment,
                        const BlockMoment& second_moment, std::int64_t numel) {
  const BlockAdamW c = adamw;
  float first[kBlock] = {};
  float second[kBlock] = {};
  decode(first_moment, numel, first);
  decode(second_moment, numel, second);
  const float* __restrict g = gradient.data();
  float* __restrict p = value.data();
  for (std::int64_t i = 0; i < kBlock; ++i) {
    const auto updated = update_element(c, g[i], {p[i], first[i], second[i]});
    first[i] = updated.first;
    second[i] = updated.second;
    p[i] = updated.value;
  }
  encode(first_moment, numel, first);
  encode(second_moment, numel, second);
}

using Update = void (*)(const BlockAdamW&, const Block&, Block&, const BlockMoment&, const BlockMoment&, std::int64_t);

void update_anywhere(const BlockAdamW& adamw, const Block& gradient, Block& value, const BlockMoment& first, const BlockMoment& second,
                     std::int64_t numel) {
  update(adamw, gradient, value, first, second, numel);
}

#if defined(__GNUC__) && defined(__x86_64__)
__attribute__((target("avx2"))) void update_avx2(const BlockAdamW& adamw, const Block& gradient, Block& value, const BlockMoment& first,
                                                 const BlockMoment& second, std::int64_t numel) {
  update(adamw, gradient, value, first, second, numel);
}
Update best_update() { return __builtin_cpu_supports("avx2") ? &update_avx2 : &update_anywhere; }
#else
Update best_update() { return &update_anywhere; }
#endif

}  // namespace

void update_block(const BlockAdamW& adamw, const Block& gradient, Block& value, BlockMoment first, BlockMoment second, std::int64_t numel) {
  static const Update best = best_update();
  best(adamw, gradient, value, first, second, numel);
}

}  // namespace fsdp::optim
