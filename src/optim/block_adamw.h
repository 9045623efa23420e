#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "base/host_device.h"
#include "optim/dynamic_map.h"

namespace fsdp::optim {

/// The number of elements that share a largest magnitude.
inline constexpr std::int64_t kBlock = 256;
using Block = std::array<float, kBlock>;

/// The numbers that an AdamW step computes from its options.
struct BlockAdamW {
  float beta1 = 0;
  float beta2 = 0;
  float eps = 0;
  float decay = 0;         ///< 1 - lr * weight_decay.
  float step_size = 0;     ///< lr over the first moment's bias correction.
  float second_scale = 0;  ///< One over the root of the second moment's bias correction.
};

/// The arithmetic of one element, without contracted products (see sum_arithmetic.h).
struct AdamWElement {
  float value;
  float first;
  float second;
};
FSDP_ELEMENT AdamWElement update_element(const BlockAdamW& c, float gradient, AdamWElement element) {
  element.first = c.beta1 * element.first + (1 - c.beta1) * gradient;
  element.second = c.beta2 * element.second + (1 - c.beta2) * (gradient * gradient);
  const float denominator = std::sqrt(element.second) * c.second_scale + c.eps;
  element.value = element.value * c.decay - c.step_size * (element.first / denominator);
  return element;
}

/// As integers, magnitudes are in the same order, and the largest may be found in any; NaN wins.
FSDP_ELEMENT std::int32_t magnitude_bits(float x) {
  std::int32_t bits = 0;
  std::memcpy(&bits, &x, sizeof bits);
  return bits & 0x7FFFFFFF;
}
FSDP_ELEMENT float divisor_for(float largest) { return largest > 0 ? largest : 1; }

/// One of the two moments of a block: codes for its elements divided by the largest magnitude, whose sign it has not.
struct BlockMoment {
  const DynamicMap* map;
  std::uint8_t* codes;
  float* largest;
};

/// One AdamW step on the first `numel` elements of a block; the rest of `value` is undefined afterwards. It does not need torch, and is in
/// a file of its own because it is compiled with other options.
void update_block(const BlockAdamW& adamw, const Block& gradient, Block& value, BlockMoment first, BlockMoment second, std::int64_t numel);

}  // namespace fsdp::optim
