#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "base/block_arithmetic.h"
#include "base/element.h"
#include "base/host_device.h"

// Differences in 4 bits (int4_differences), block by block. A block is one scale in bfloat16 and an integer from -7 to 7 for each element.
// Every sum and product of a decoded value is exact in fp32, so that all ranks, and loops and operators, get the same bits.
namespace fsdp {

/// The largest integer of a block; the scale is such that the largest magnitude becomes it.
inline constexpr float kLargestInt4 = 7;
/// The bits of a scale that is NaN.
inline constexpr std::int32_t kInt4NanScale = 0x7fc0;
/// The longest block that can be transformed: sums of so many integers, times a scale, are exact in fp32.
inline constexpr std::int64_t kLongestTransform = 256;

/// Pieces of `numel` elements each, in complete blocks, and their bytes: for each piece two elements per byte, then the scales of its
/// blocks. Byte i of a block has its elements i (low bits) and i + block / 2.
struct Int4Pieces {
  void* values = nullptr;  ///< Differences (fp32) to encode, or the elements to which decoded differences are added.
  std::uint8_t* encoded = nullptr;
  std::int64_t pieces = 0;
  std::int64_t numel = 0;
  std::int64_t block = 0;
  bool hadamard = false;  ///< Whether the integers are those of the block's Hadamard transform. The block is then a power of two.

  std::int64_t blocks() const { return pieces * (numel / block); }
  std::uint8_t* codes_of(std::int64_t number) const {
    const std::int64_t in_piece = numel / block;
    return piece_of(number) + number % in_piece * (block / 2);
  }
  std::uint8_t* scale_of(std::int64_t number) const {
    const std::int64_t in_piece = numel / block;
    return piece_of(number) + numel / 2 + number % in_piece * 2;
  }

 private:
  std::uint8_t* piece_of(std::int64_t number) const {
    const std::int64_t in_piece = numel / block;
    return encoded + number / in_piece * (numel / 2 + in_piece * 2);
  }
};

/// The bits of a block's scale: the largest magnitude / 7, rounded up to bfloat16. NaN if a value of the block is not finite.
FSDP_ELEMENT std::uint16_t int4_scale_for(float largest) {
  if (bits_of(largest) >= 0x7f800000u) return std::uint16_t{kInt4NanScale};
  return static_cast<std::uint16_t>((bits_of(largest * (1 / kLargestInt4)) + 0xffffu) >> 16);
}
FSDP_ELEMENT float int4_scale_value(std::uint16_t bits) { return float_of(static_cast<std::uint32_t>(bits) << 16); }

/// The nearest integer, even if there are two, in the low four bits. The sum has no fraction bits left.
FSDP_ELEMENT std::uint32_t int4_code(float value, float scale) {
  const float scaled = scale > 0 ? value / scale : 0;
  return bits_of(scaled + 12582912.0f) & 0xfu;
}

inline void encode_int4_block(const Int4Pieces& given, std::int64_t number) {
  const float* values = static_cast<const float*>(given.values) + number * given.block;
  float transformed[kLongestTransform];
  if (given.hadamard) {
    std::memcpy(transformed, values, static_cast<std::size_t>(given.block) * sizeof(float));
    hadamard_transform(transformed, given.block);
    values = transformed;
  }
  const std::uint16_t bits = int4_scale_for(float_of(largest_magnitude(values, given.block)));
  const float scale = int4_scale_value(bits);
  const std::int64_t half = given.block / 2;
  std::uint8_t* const codes = given.codes_of(number);
  for (std::int64_t i = 0; i < half; ++i) {
    codes[i] = static_cast<std::uint8_t>(int4_code(values[i], scale) | int4_code(values[i + half], scale) << 4);
  }
  std::memcpy(given.scale_of(number), &bits, sizeof bits);
}

/// Adds the decoded differences of a block to its elements.
template <typename T>
inline void add_int4_block(const Int4Pieces& given, std::int64_t number) {
  using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;
  T* const values = static_cast<T*>(given.values) + number * given.block;
  const std::uint8_t* const codes = given.codes_of(number);
  std::uint16_t bits = 0;
  std::memcpy(&bits, given.scale_of(number), sizeof bits);
  const float scale = int4_scale_value(bits);
  const std::int64_t half = given.block / 2;
  if (!given.hadamard) {
    for (std::int64_t i = 0; i < half; ++i) {
      const std::uint32_t both = codes[i];
      values[i] = rounded_to<T>(static_cast<Wide>(values[i]) + static_cast<Wide>(int4_value(both) * scale));
      values[i + half] = rounded_to<T>(static_cast<Wide>(values[i + half]) + static_cast<Wide>(int4_value(both >> 4) * scale));
    }
    return;
  }
  float integers[kLongestTransform] = {};
  for (std::int64_t i = 0; i < half; ++i) {
    integers[i] = int4_value(codes[i]);
    integers[i + half] = int4_value(static_cast<std::uint32_t>(codes[i]) >> 4);
  }
  hadamard_transform(integers, given.block);
  const float factor = scale / static_cast<float>(given.block);
  for (std::int64_t i = 0; i < given.block; ++i) {
    values[i] = rounded_to<T>(static_cast<Wide>(values[i]) + static_cast<Wide>(integers[i] * factor));
  }
}

}  // namespace fsdp
