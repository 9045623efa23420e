#pragma once

#include <c10/core/Stream.h>
#include <c10/util/Float8_e4m3fn.h>

#include <cstdint>

#include "base/device_functions.h"
#include "base/element.h"
#include "base/host_device.h"

// The 8-bit format of gathers (float8_blocks), block by block: for the loop on the CPU and for a kernel.
namespace fsdp {

/// Pieces of `numel` elements each, in complete blocks, and their bytes: for each piece its elements, then the scales of its blocks.
struct BlockedPieces {
  void* values = nullptr;
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  std::uint8_t* encoded = nullptr;
  std::int64_t pieces = 0;
  std::int64_t numel = 0;
  std::int64_t block = 0;

  FSDP_HOST_DEVICE std::int64_t blocks() const { return pieces * (numel / block); }
  FSDP_HOST_DEVICE std::int64_t encoded_bytes() const { return numel + numel / block; }  ///< Of a piece.
  FSDP_HOST_DEVICE std::uint8_t* codes_of(std::int64_t number) const {
    const std::int64_t in_piece = numel / block;
    return encoded + number / in_piece * encoded_bytes() + number % in_piece * block;
  }
  FSDP_HOST_DEVICE std::uint8_t* scale_of(std::int64_t number) const {
    const std::int64_t in_piece = numel / block;
    return encoded + number / in_piece * encoded_bytes() + numel + number % in_piece;
  }
};

/// Puts the conversion on the stream, whose device is the current one.
using LaunchConversion = void(const BlockedPieces& pieces, const c10::Stream& stream);
DeviceFunctions<LaunchConversion>& device_encoders();
DeviceFunctions<LaunchConversion>& device_decoders();

/// The largest value of float8_e4m3fn.
inline constexpr float kLargestFloat8 = 448;
/// A scale's byte (e8m0) stands for 2^(byte - 127); this one for NaN.
inline constexpr std::uint8_t kNanScale = 255;

FSDP_ELEMENT float scale_value(std::uint8_t byte) {
  if (byte == kNanScale) return float_of(0x7fc00000u);
  return float_of(byte == 0 ? 0x00400000u : static_cast<std::uint32_t>(byte) << 23);
}

/// The smallest power of two with which the largest magnitude of a block, whose bits are given, fits. The least one is 2^-127.
FSDP_ELEMENT std::uint8_t scale_for(std::uint32_t largest) {
  if (largest >= 0x7f800000u) return kNanScale;
  const std::uint32_t bits = bits_of(float_of(largest) / kLargestFloat8);
  const std::uint32_t exponent = bits >> 23;
  const std::uint32_t mantissa = bits & 0x7fffffu;
  if (exponent == 0) return mantissa > 0x400000u ? 1 : 0;
  return static_cast<std::uint8_t>(exponent + (mantissa != 0 ? 1u : 0u));
}

/// `a` if the condition holds, else `b`. The compiler moves no arithmetic behind it, as it would into a branch, which loops that vectorize
/// must not have.
FSDP_ELEMENT std::uint32_t select(bool condition, std::uint32_t a, std::uint32_t b) {
  const std::uint32_t mask = 0u - static_cast<std::uint32_t>(condition);
  return (a & mask) | (b & ~mask);
}

/// The conversions of c10::Float8_e4m3fn (torch 2.13), without branches: a sign, four bits of an exponent whose bias is 7, three bits of a
/// mantissa. There is no infinity; what is too large becomes the largest number.
FSDP_ELEMENT std::uint8_t float8_code(float value) {
  constexpr std::uint32_t kBiases = 120u << 23;  // Their difference.
  constexpr std::uint32_t kLargest = 0x7e, kNan = 0x7f, kInfinity = 0x7f800000u;
  const std::uint32_t sign = bits_of(value) & 0x80000000u;
  const std::uint32_t magnitude = bits_of(value) ^ sign;
  const std::uint32_t normal = (magnitude - kBiases + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20;  // Halves to even.
  // Below 2^-6, codes are multiples of 2^-9, as the numbers from 2^14 on are in fp32.
  const std::uint32_t subnormal = bits_of(float_of(magnitude) + 16384.0f) - bits_of(16384.0f);
  const std::uint32_t finite = select(magnitude < kBiases + (1u << 23), subnormal, normal);
  const std::uint32_t code = select(finite < kLargest, finite, kLargest) | sign >> 24;
  return static_cast<std::uint8_t>(select(magnitude > kInfinity, kNan, code));
}
FSDP_ELEMENT float float8_value(std::uint8_t code) {
  const std::uint32_t magnitude = code & 0x7fu;
  const std::uint32_t normal = (magnitude << 20) + (120u << 23);
  const std::uint32_t subnormal = bits_of(static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-9f);
  const std::uint32_t finite = select(magnitude < 8, subnormal, normal);
  return float_of(select(magnitude == 0x7f, 0x7fc00000u, finite) | (code & 0x80u) << 24);
}

template <typename T>
FSDP_ELEMENT std::uint8_t encoded(T value, float scale) {
  return float8_code(static_cast<float>(value) / scale);
}
template <typename T>
FSDP_ELEMENT T decoded(std::uint8_t code, float scale) {
  return rounded_to<T>(float8_value(code) * scale);
}

/// Encodes a block by one thread, pack by pack: a block has complete packs. The second reading comes from the nearest cache.
template <typename T>
FSDP_HOST_DEVICE inline void encode_block(const BlockedPieces& given, std::int64_t number) {
  const T* const values = static_cast<const T*>(given.values) + number * given.block;
  std::uint32_t largest = 0;  // As integers, magnitudes are in the same order; NaN wins.
  for (std::int64_t at = 0; at < given.block; at += kPack) {
    const Pack<T> pack = read_pack(values + at);
    FSDP_UNROLL
    for (int i = 0; i < kPack; ++i) {
      const std::uint32_t magnitude = bits_of(static_cast<float>(pack.values[i])) & 0x7fffffffu;
      largest = magnitude > largest ? magnitude : largest;
    }
  }
  const std::uint8_t byte = scale_for(largest);
  const float scale = scale_value(byte);
  std::uint8_t* const to = given.codes_of(number);
  for (std::int64_t at = 0; at < given.block; at += kPack) {
    const Pack<T> pack = read_pack(values + at);
    Pack<std::uint8_t> codes{};
    FSDP_UNROLL
    for (int i = 0; i < kPack; ++i) codes.values[i] = encoded(pack.values[i], scale);
    write_pack(to + at, codes);
  }
  *given.scale_of(number) = byte;
}

/// Decodes a block, in a loop that vectorizes.
template <typename T>
inline void decode_block(const BlockedPieces& given, std::int64_t number) {
  const float scale = scale_value(*given.scale_of(number));
  const std::uint8_t* const codes = given.codes_of(number);
  T* const values = static_cast<T*>(given.values) + number * given.block;
  for (std::int64_t i = 0; i < given.block; ++i) values[i] = decoded<T>(codes[i], scale);
}

/// `kPack` elements, which lie in one block.
template <typename T>
FSDP_HOST_DEVICE inline void decode_pack(const BlockedPieces& given, std::int64_t pack) {
  const std::int64_t at = pack * kPack;
  const std::int64_t number = at / given.block;
  const float scale = scale_value(*given.scale_of(number));
  const std::uint8_t* const codes = given.codes_of(number) + at % given.block;
  Pack<T> result{};
  FSDP_UNROLL
  for (int i = 0; i < kPack; ++i) result.values[i] = decoded<T>(codes[i], scale);
  write_pack(static_cast<T*>(given.values) + at, result);
}

/// The work of thread number `thread` of `threads`.
template <typename T>
FSDP_HOST_DEVICE inline void encode_blocks(const BlockedPieces& given, std::int64_t thread, std::int64_t threads) {
  for (std::int64_t number = thread; number < given.blocks(); number += threads) encode_block<T>(given, number);
}
template <typename T>
FSDP_HOST_DEVICE inline void decode_blocks(const BlockedPieces& given, std::int64_t thread, std::int64_t threads) {
  const std::int64_t packs = given.pieces * given.numel / kPack;
  for (std::int64_t pack = thread; pack < packs; pack += threads) decode_pack<T>(given, pack);
}

}  // namespace fsdp
