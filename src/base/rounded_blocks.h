#pragma once

#include <cstdint>
#include <string>

#include "base/host_device.h"
#include "fsdp/grad_comm_format.h"

// GradCommFormat on the CPU. rounded_rows.h has it for tensors on any device.
//
// Encoded elements are blocks, one behind the other: an fp32 scale, then integers. Two integers of 4 bits share a byte: an element of the
// block's first half, in the lower bits, and that of the same place in the second half. If the last block is shorter, it is filled with
// zeros up to a multiple of 8 elements, or, for the transform, up to a power of two. Its size in bytes is thus a multiple of 4.
namespace fsdp {

/// Throws Error for bits and blocks that do not exist.
void check_format(const GradCommFormat& format);

/// Returns a text such as "8 bits per element, in blocks of 128" that contains every setting.
std::string describe(const GradCommFormat& format);

/// Returns a hash of every setting, for which ranks compare their calls. It builds no text.
std::uint64_t hash_of(const GradCommFormat& format);

/// The size of so many elements after encoding.
std::int64_t encoded_bytes(const GradCommFormat& format, std::int64_t numel);

/// The number of elements after the last block has been filled.
std::int64_t padded_numel(const GradCommFormat& format, std::int64_t numel);

/// Returns a random number from others. Another seed, or another order of calls, gives another one.
FSDP_HOST_DEVICE constexpr std::uint64_t scrambled(std::uint64_t value) {
  value += 0x9e3779b97f4a7c15ULL;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ULL;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebULL;
  return value ^ (value >> 31);
}

/// Encodes `numel` elements, of which the first begins block number `first`. `values` is overwritten, and has room for padded_numel()
/// elements. `key` chooses the random numbers of stochastic rounding. `lost`, if it is not null, has `numel` elements, which are added to
/// the values before; it receives what rounding has lost of the sum, or zero where that is not finite.
void encode_blocks(const GradCommFormat& format, float* values, std::int64_t numel, std::uint64_t key, std::int64_t first, float* lost,
                   std::uint8_t* encoded);

/// Decodes `numel` elements. `values` has room for padded_numel() elements.
void decode_blocks(const GradCommFormat& format, const std::uint8_t* encoded, std::int64_t numel, float* values);

}  // namespace fsdp
