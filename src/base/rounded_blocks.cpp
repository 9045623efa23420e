#include "base/rounded_blocks.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/block_arithmetic.h"
#include "base/element.h"
#include "fsdp/error.h"

namespace fsdp {
namespace {

constexpr auto kScaleBytes = static_cast<std::int64_t>(sizeof(float));
constexpr std::uint32_t kInfinity = 0x7f800000;

/// The largest integer.
float levels_of(const GradCommFormat& format) { return format.bits == 8 ? 127.0f : 7.0f; }

/// The number of integers that are sent for a block with `numel` elements.
std::int64_t integers_of(const GradCommFormat& format, std::int64_t numel) {
  constexpr std::int64_t kFewest = 8;
  if (!format.hadamard) return (numel + kFewest - 1) / kFewest * kFewest;
  return std::max(kFewest, static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(numel))));
}

std::int64_t block_bytes(const GradCommFormat& format, std::int64_t numel) {
  return kScaleBytes + integers_of(format, numel) * format.bits / 8;
}

/// It is its own inverse, except for rounding. `numel` is a power of two.
void walsh_hadamard(float* values, std::int64_t numel) {
  const float norm = 1.0f / std::sqrt(static_cast<float>(numel));
  for (std::int64_t i = 0; i < numel; ++i) values[i] *= norm;  // First, so that sums overflow only if results do.
  hadamard_transform(values, numel);
}

/// Rounds to the nearest integer, halves to even. (SSE2 has no such instruction, and std::nearbyint does not vectorize.) For magnitudes up
/// to 2^22.
float nearest(float value) {
  constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: its neighbours are integers.
  return (value + kShift) - kShift;
}

/// A number in [-0.5, 0.5), in steps of 2^-24. A value to which it is added, rounded to the nearest integer, has the value as its mean.
float draw(std::uint32_t key, std::uint32_t element) {
  std::uint32_t hash = key + element * 0x9e3779b9u;
  hash = (hash ^ (hash >> 16)) * 0x7feb352du;
  hash = (hash ^ (hash >> 15)) * 0x846ca68bu;
  hash ^= hash >> 16;
  return static_cast<float>(static_cast<std::int32_t>(hash >> 8)) * 0x1p-24f - 0.5f;
}

/// Replaces values by integers.
void round_block(const GradCommFormat& format, float* values, std::int64_t numel, float scale, std::uint32_t key) {
  const float most = levels_of(format);
  // With a scale that is not normal, a quotient may be larger.
  const auto clamped = [most](float value) { return std::min(std::max(value, -most), most); };
  if (!format.stochastic_rounding) {
    for (std::int64_t i = 0; i < numel; ++i) values[i] = clamped(nearest(values[i] / scale));
    return;
  }
  for (std::int64_t i = 0; i < numel; ++i) {
    values[i] = clamped(nearest(values[i] / scale + draw(key, static_cast<std::uint32_t>(i))));
  }
}

void encode_one(const GradCommFormat& format, float* values, std::int64_t numel, std::uint32_t key, float* lost, std::uint8_t* encoded) {
  const std::int64_t integers = integers_of(format, numel);
  for (std::int64_t i = 0; lost != nullptr && i < numel; ++i) lost[i] = values[i] += lost[i];
  std::fill(values + numel, values + integers, 0.0f);
  if (format.hadamard) walsh_hadamard(values, integers);
  const std::uint32_t largest = largest_magnitude(values, integers);
  const float scale = largest >= kInfinity ? std::numeric_limits<float>::quiet_NaN() : float_of(largest) / levels_of(format);
  if (scale > 0) {
    round_block(format, values, integers, scale, key);
  } else {
    std::fill_n(values, integers, 0.0f);
  }
  std::memcpy(encoded, &scale, sizeof scale);
  encoded += kScaleBytes;
  if (format.bits == 8) {
    for (std::int64_t i = 0; i < integers; ++i) encoded[i] = static_cast<std::uint8_t>(static_cast<std::int32_t>(values[i]));
  } else {
    const float* const second = values + integers / 2;
    for (std::int64_t i = 0; i < integers / 2; ++i) {
      const auto low = static_cast<std::uint32_t>(static_cast<std::int32_t>(values[i])) & 15u;
      encoded[i] = static_cast<std::uint8_t>(low | (static_cast<std::uint32_t>(static_cast<std::int32_t>(second[i])) << 4));
    }
  }
  if (lost == nullptr) return;
  for (std::int64_t i = 0; i < integers; ++i) values[i] *= scale;
  if (format.hadamard) walsh_hadamard(values, integers);
  for (std::int64_t i = 0; i < numel; ++i) {
    const float rest = lost[i] - values[i];
    lost[i] = (bits_of(rest) & 0x7fffffffu) < kInfinity ? rest : 0.0f;
  }
}

void decode_one(const GradCommFormat& format, const std::uint8_t* encoded, std::int64_t numel, float* values) {
  const std::int64_t integers = integers_of(format, numel);
  float scale = 0;
  std::memcpy(&scale, encoded, sizeof scale);
  encoded += kScaleBytes;
  if (format.bits == 8) {
    for (std::int64_t i = 0; i < integers; ++i) values[i] = static_cast<float>(static_cast<std::int8_t>(encoded[i])) * scale;
  } else {
    const auto signed_value = [](std::uint32_t bits) { return static_cast<float>(static_cast<std::int32_t>(bits ^ 8u) - 8); };
    float* const second = values + integers / 2;
    for (std::int64_t i = 0; i < integers / 2; ++i) {
      values[i] = signed_value(encoded[i] & 15u) * scale;
      second[i] = signed_value(encoded[i] >> 4) * scale;
    }
  }
  if (format.hadamard) walsh_hadamard(values, integers);
}

/// Calls fn(number of the block, its first element, its number of elements).
template <typename Fn>
void for_each_block(const GradCommFormat& format, std::int64_t numel, const Fn& fn) {
  for (std::int64_t number = 0, begin = 0; begin < numel; ++number, begin += format.block) {
    fn(number, begin, std::min(format.block, numel - begin));
  }
}

}  // namespace

void check_format(const GradCommFormat& format) {
  if (format.bits != 8 && format.bits != 4) {
    throw Error("grad_comm_format: " + std::to_string(format.bits) + " bits; gradients are sent in 8 or 4");
  }
  if (format.block <= 0 || format.block % 32 != 0) {
    throw Error("grad_comm_format: a block of " + std::to_string(format.block) + " elements; give a positive multiple of 32");
  }
  if (format.hadamard && !std::has_single_bit(static_cast<std::uint64_t>(format.block))) {
    throw Error("grad_comm_format: hadamard transforms blocks of a power of two elements, not of " + std::to_string(format.block));
  }
}

std::string describe(const GradCommFormat& format) {
  std::string text = std::to_string(format.bits) + " bits per element, in blocks of " + std::to_string(format.block);
  if (format.hadamard) text += ", transformed";
  if (format.stochastic_rounding) text += ", rounded at random with seed " + std::to_string(format.seed);
  if (format.error_feedback) text += ", with error feedback";
  return text;
}

std::uint64_t hash_of(const GradCommFormat& format) {
  std::uint64_t hash = format.seed;
  for (const std::int64_t setting : {std::int64_t{format.bits}, format.block, std::int64_t{format.hadamard},
                                     std::int64_t{format.stochastic_rounding}, std::int64_t{format.error_feedback}}) {
    hash = scrambled(hash ^ static_cast<std::uint64_t>(setting));
  }
  return hash;
}

std::int64_t encoded_bytes(const GradCommFormat& format, std::int64_t numel) {
  const std::int64_t rest = numel % format.block;
  return numel / format.block * block_bytes(format, format.block) + (rest > 0 ? block_bytes(format, rest) : 0);
}

void encode_blocks(const GradCommFormat& format, float* values, std::int64_t numel, std::uint64_t key, std::int64_t first, float* lost,
                   std::uint8_t* encoded) {
  const std::int64_t bytes = block_bytes(format, format.block);
  for_each_block(format, numel, [&](std::int64_t number, std::int64_t begin, std::int64_t count) {
    const auto drawn = static_cast<std::uint32_t>(scrambled(key + static_cast<std::uint64_t>(first + number)) >> 32);
    encode_one(format, values + begin, count, drawn, lost == nullptr ? nullptr : lost + begin, encoded + number * bytes);
  });
}

void decode_blocks(const GradCommFormat& format, const std::uint8_t* encoded, std::int64_t numel, float* values) {
  const std::int64_t bytes = block_bytes(format, format.block);
  for_each_block(format, numel, [&](std::int64_t number, std::int64_t begin, std::int64_t count) {
    decode_one(format, encoded + number * bytes, count, values + begin);
  });
}

}  // namespace fsdp
