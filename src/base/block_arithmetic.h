#pragma once

#include <cstdint>

#include "base/element.h"
#include "base/host_device.h"

// The arithmetic of blocks that several formats share. Functions of whole blocks are for the CPU.
namespace fsdp {

/// Returns the integer of 4 bits in the lower bits of `code`. Its other bits do not matter.
FSDP_ELEMENT float int4_value(std::uint32_t code) { return static_cast<float>(static_cast<std::int32_t>((code & 15u) ^ 8u) - 8); }

/// Replaces `numel` values, a power of two, by their Hadamard transform without its factor. Twice the transform is the values times
/// `numel`.
inline void hadamard_transform(float* values, std::int64_t numel) {
  for (std::int64_t half = 1; half < numel; half *= 2) {
    for (std::int64_t begin = 0; begin < numel; begin += 2 * half) {
      for (std::int64_t i = begin; i < begin + half; ++i) {
        const float a = values[i], b = values[i + half];
        values[i] = a + b;
        values[i + half] = a - b;
      }
    }
  }
}

/// Returns the bits of the largest magnitude; those of a NaN if there is one. As integers, magnitudes are in the same order.
inline std::uint32_t largest_magnitude(const float* values, std::int64_t numel) {
  std::uint32_t largest = 0;
  for (std::int64_t i = 0; i < numel; ++i) {
    const std::uint32_t magnitude = bits_of(values[i]) & 0x7fffffffu;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

}  // namespace fsdp
