#pragma once

#include <c10/core/Stream.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "base/block_arithmetic.h"
#include "base/device_functions.h"
#include "base/element.h"
#include "base/host_device.h"
#include "base/rounded_blocks.h"
#include "base/stable_hash.h"
#include "fsdp/grad_comm_format.h"

// The arithmetic of GradCommFormat, block by block: for the loop on the CPU and for a kernel.
//
// A block is the work of a team: a warp on a GPU, one thread on the CPU. All threads of a team call the functions below with the same
// arguments. A team has
// - for_each(count, fn), which calls fn(0), ..., fn(count - 1), each on one thread, and returns when all of them have returned;
// - largest(values, count), the bits of the largest magnitude, on all threads;
// - transform(values, count), a Hadamard transform without its factor.
namespace fsdp {

/// One thread, whose loops vectorize.
struct OneThread {
  template <typename Fn>
  FSDP_ELEMENT void for_each(std::int64_t count, const Fn& fn) const {
    for (std::int64_t i = 0; i < count; ++i) fn(i);
  }
  std::uint32_t largest(const float* values, std::int64_t count) const { return largest_magnitude(values, count); }
  void transform(float* values, std::int64_t count) const { hadamard_transform(values, count); }
};

/// The transform of a team of several threads: pairs of elements are shared out between them.
template <typename Team>
FSDP_HOST_DEVICE inline void transform_in_pairs(const Team& team, float* values, std::int64_t count) {
  for (std::int64_t half = 1; half < count; half *= 2) {
    team.for_each(count / 2, [=](std::int64_t pair) {
      float* const first = values + pair + (pair & -half);
      const float a = first[0], b = first[half];
      first[0] = a + b;
      first[half] = a - b;
    });
  }
}

FSDP_ELEMENT float largest_integer(const GradCommFormat& format) { return format.bits == 8 ? 127.0f : 7.0f; }

/// The number of integers that are sent for a block with `numel` elements.
FSDP_HOST_DEVICE inline std::int64_t integers_of(const GradCommFormat& format, std::int64_t numel) {
  std::int64_t integers = 8;
  if (!format.hadamard) return (numel + integers - 1) / integers * integers;
  while (integers < numel) integers *= 2;
  return integers;
}

/// The size of a block with `numel` elements: a scale, then the integers.
FSDP_HOST_DEVICE inline std::int64_t block_bytes(const GradCommFormat& format, std::int64_t numel) {
  return static_cast<std::int64_t>(sizeof(float)) + integers_of(format, numel) * format.bits / 8;
}

/// Rounds to the nearest integer, halves to even. (SSE2 has no such instruction, and std::nearbyint does not vectorize.) For magnitudes up
/// to 2^22.
FSDP_ELEMENT float nearest(float value) {
  constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: its neighbours are integers.
  return (value + kShift) - kShift;
}

/// A number in [-0.5, 0.5), in steps of 2^-24. A value to which it is added, rounded to the nearest integer, has the value as its mean.
FSDP_ELEMENT float draw(std::uint32_t key, std::uint32_t element) {
  std::uint32_t hash = key + element * 0x9e3779b9u;
  hash = (hash ^ (hash >> 16)) * 0x7feb352du;
  hash = (hash ^ (hash >> 15)) * 0x846ca68bu;
  hash ^= hash >> 16;
  return static_cast<float>(static_cast<std::int32_t>(hash >> 8)) * 0x1p-24f - 0.5f;
}

/// Rounded, and not larger than `most`. With a scale that is not normal, a quotient may be.
FSDP_ELEMENT float clamped_integer(float quotient, float most) {
  const float integer = nearest(quotient);
  const float not_less = integer < -most ? -most : integer;
  return most < not_less ? most : not_less;
}

/// The integer's two's complement in the lower bits.
FSDP_ELEMENT std::uint32_t bits_of_integer(float integer) { return static_cast<std::uint32_t>(static_cast<std::int32_t>(integer)); }

/// It is its own inverse, except for rounding. `count` is a power of two.
template <typename Team>
FSDP_HOST_DEVICE inline void walsh_hadamard(const Team& team, float* values, std::int64_t count) {
  const float norm = 1.0f / std::sqrt(static_cast<float>(count));
  team.for_each(count, [=](std::int64_t i) { values[i] *= norm; });  // First, so that sums overflow only if results do.
  team.transform(values, count);
}

/// Encodes a block of `numel` elements; see encode_blocks(). `key` is the block's own.
template <typename Team>
FSDP_HOST_DEVICE inline void encode_rounded(const Team& team, const GradCommFormat& format, float* values, std::int64_t numel,
                                            std::uint32_t key, float* lost, std::uint8_t* encoded) {
  constexpr std::uint32_t kInfinity = 0x7f800000u, kNan = 0x7fc00000u;
  const std::int64_t integers = integers_of(format, numel);
  if (lost != nullptr) team.for_each(numel, [=](std::int64_t i) { lost[i] = values[i] += lost[i]; });
  team.for_each(integers - numel, [=](std::int64_t i) { values[numel + i] = 0; });
  if (format.hadamard) walsh_hadamard(team, values, integers);
  const float most = largest_integer(format);
  const std::uint32_t largest = team.largest(values, integers);
  const float scale = largest >= kInfinity ? float_of(kNan) : float_of(largest) / most;
  if (!(scale > 0)) {
    team.for_each(integers, [=](std::int64_t i) { values[i] = 0; });
  } else if (!format.stochastic_rounding) {
    team.for_each(integers, [=](std::int64_t i) { values[i] = clamped_integer(values[i] / scale, most); });
  } else {
    team.for_each(integers,
                  [=](std::int64_t i) { values[i] = clamped_integer(values[i] / scale + draw(key, static_cast<std::uint32_t>(i)), most); });
  }
  std::memcpy(encoded, &scale, sizeof scale);
  std::uint8_t* const codes = encoded + sizeof scale;
  if (format.bits == 8) {
    team.for_each(integers, [=](std::int64_t i) { codes[i] = static_cast<std::uint8_t>(bits_of_integer(values[i])); });
  } else {
    const float* const second = values + integers / 2;
    team.for_each(integers / 2, [=](std::int64_t i) {
      codes[i] = static_cast<std::uint8_t>((bits_of_integer(values[i]) & 15u) | (bits_of_integer(second[i]) << 4));
    });
  }
  if (lost == nullptr) return;
  team.for_each(integers, [=](std::int64_t i) { values[i] *= scale; });
  if (format.hadamard) walsh_hadamard(team, values, integers);
  team.for_each(numel, [=](std::int64_t i) {
    const float rest = lost[i] - values[i];
    lost[i] = (bits_of(rest) & 0x7fffffffu) < kInfinity ? rest : 0.0f;
  });
}

/// Decodes a block of `numel` elements; see decode_blocks().
template <typename Team>
FSDP_HOST_DEVICE inline void decode_rounded(const Team& team, const GradCommFormat& format, const std::uint8_t* encoded, std::int64_t numel,
                                            float* values) {
  const std::int64_t integers = integers_of(format, numel);
  float scale = 0;
  std::memcpy(&scale, encoded, sizeof scale);
  const std::uint8_t* const codes = encoded + sizeof scale;
  if (format.bits == 8) {
    team.for_each(integers, [=](std::int64_t i) { values[i] = static_cast<float>(static_cast<std::int8_t>(codes[i])) * scale; });
  } else {
    float* const second = values + integers / 2;
    team.for_each(integers / 2, [=](std::int64_t i) {
      values[i] = int4_value(codes[i]) * scale;
      second[i] = int4_value(codes[i] >> 4) * scale;
    });
  }
  if (format.hadamard) walsh_hadamard(team, values, integers);
}

/// The key of a block, from that of its contribution.
FSDP_ELEMENT std::uint32_t key_of_block(std::uint64_t key, std::int64_t number) {
  return static_cast<std::uint32_t>(scrambled(key + static_cast<std::uint64_t>(number)) >> 32);
}

/// RoundedRows as a kernel gets them. `values` has a row for every number; `encoded` and `lost` have none for `own`.
struct RoundedPart {
  float* values = nullptr;
  std::int64_t value_stride = 0;
  std::uint8_t* encoded = nullptr;
  std::int64_t encoded_stride = 0;
  float* lost = nullptr;
  std::int64_t lost_stride = 0;
  std::int64_t rows = 0;  ///< Of `encoded`.
  std::int64_t own = 0;
  std::int64_t numel = 0;
  std::int64_t first = 0;
  std::uint64_t key = 0;
  const std::int64_t* reduction_number = nullptr;
};

/// The parts of one launch. They are as large as the arguments of a kernel may be on every GPU: 4 KiB.
struct DeviceRounding {
  static constexpr int kMostParts = 42;

  RoundedPart parts[kMostParts] = {};
  std::int32_t count = 0;  ///< The number of parts.
  GradCommFormat format;
};
static_assert(sizeof(DeviceRounding) <= 4096);

/// Puts the conversion on the stream, whose device is the current one.
using LaunchRounding = void(const DeviceRounding& rounding, const c10::Stream& stream);
DeviceFunctions<LaunchRounding>& device_rounders();
DeviceFunctions<LaunchRounding>& device_unrounders();

/// The number of blocks of a part, in all rows.
FSDP_HOST_DEVICE inline std::int64_t blocks_of(const GradCommFormat& format, const RoundedPart& part) {
  return part.rows * ((part.numel + format.block - 1) / format.block);
}

/// The work of one team: encodes or decodes block number `block` of a part.
template <bool kEncodes, typename Team>
FSDP_HOST_DEVICE inline void convert_block(const Team& team, const GradCommFormat& format, const RoundedPart& part, std::int64_t block) {
  const std::int64_t in_row = (part.numel + format.block - 1) / format.block;
  const std::int64_t row = block / in_row, number = block % in_row, begin = number * format.block;
  const std::int64_t rest = part.numel - begin, numel = rest < format.block ? rest : format.block;
  const std::int64_t other = row < part.own ? row : row + 1;
  float* const values = part.values + other * part.value_stride + begin;
  std::uint8_t* const encoded = part.encoded + row * part.encoded_stride + number * block_bytes(format, format.block);
  if constexpr (kEncodes) {
    float* const lost = part.lost == nullptr ? nullptr : part.lost + row * part.lost_stride + begin;
    std::uint64_t key = part.reduction_number == nullptr ? part.key : mix(part.key, static_cast<std::uint64_t>(*part.reduction_number));
    key = mix(mix(key, static_cast<std::uint64_t>(part.own)), static_cast<std::uint64_t>(other));
    encode_rounded(team, format, values, numel, key_of_block(key, part.first + number), lost, encoded);
  } else {
    decode_rounded(team, format, encoded, numel, values);
  }
}

/// The work of team number `number` of `teams` for one part.
template <bool kEncodes, typename Team>
FSDP_HOST_DEVICE inline void convert_part(const Team& team, const GradCommFormat& format, const RoundedPart& part, std::int64_t number,
                                          std::int64_t teams) {
  const std::int64_t blocks = blocks_of(format, part);
  for (std::int64_t block = number; block < blocks; block += teams) convert_block<kEncodes>(team, format, part, block);
}

}  // namespace fsdp
