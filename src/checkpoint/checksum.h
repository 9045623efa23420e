#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace fsdp::ckpt {

/// Checksums of bytes as they pass: `crc` is that of the bytes before (0 at first), the result that of all. About 10 GB/s and core where
/// the processor multiplies without carry (x86-64 since 2010), 1 GB/s elsewhere.
///
/// Our own, although libraries exist: the fast ones of Debian (ISA-L) are not there where nothing but headers can be installed, and the
/// project must build there, too.
///
/// It is zip's, as torch.save's records have it. The sidecar has the same one, so that each byte is summed once for both.
std::uint32_t crc32(std::uint32_t crc, std::span<const char> data);

/// The checksum of A and B one after the other, from theirs and B's length in bytes: parts can be computed in any order and in parallel.
std::uint32_t combine_crc32(std::uint32_t crc_a, std::uint32_t crc_b, std::uint64_t length_b);

namespace detail {
/// The same without special instructions.
std::uint32_t portable_crc32(std::uint32_t crc, std::span<const char> data);
}  // namespace detail

}  // namespace fsdp::ckpt
