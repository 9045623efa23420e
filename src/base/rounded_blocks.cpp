#include "base/rounded_blocks.h"

#include <algorithm>
#include <bit>

#include "base/rounded_arithmetic.h"
#include "fsdp/error.h"

namespace fsdp {
namespace {

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

std::int64_t padded_numel(const GradCommFormat& format, std::int64_t numel) {
  const std::int64_t rest = numel % format.block;
  return numel - rest + (rest > 0 ? integers_of(format, rest) : 0);
}

void encode_blocks(const GradCommFormat& format, float* values, std::int64_t numel, std::uint64_t key, std::int64_t first, float* lost,
                   std::uint8_t* encoded) {
  const std::int64_t bytes = block_bytes(format, format.block);
  for_each_block(format, numel, [&](std::int64_t number, std::int64_t begin, std::int64_t count) {
    encode_rounded(OneThread{}, format, values + begin, count, key_of_block(key, first + number), lost == nullptr ? nullptr : lost + begin,
                   encoded + number * bytes);
  });
}

void decode_blocks(const GradCommFormat& format, const std::uint8_t* encoded, std::int64_t numel, float* values) {
  const std::int64_t bytes = block_bytes(format, format.block);
  for_each_block(format, numel, [&](std::int64_t number, std::int64_t begin, std::int64_t count) {
    decode_rounded(OneThread{}, format, encoded + number * bytes, count, values + begin);
  });
}

}  // namespace fsdp
