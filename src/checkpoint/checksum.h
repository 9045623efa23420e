#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace fsdp::ckpt {

/// Checksums of bytes as they pass: `crc` is that of the bytes before (0 at first), the result that of all. The fastest of four ways that
/// the processor has. Bytes that are in its cache pass one core at about 60 GB/s where it multiplies 512 bits at once without carry
/// (Intel's Ice Lake, AMD's Zen 4), 30 GB/s with 256 bits (Zen 3), 15 GB/s with 128 bits (x86-64 since 2010), 2 GB/s elsewhere.
///
/// Our own, although libraries exist: the fast ones of Debian (ISA-L) are not there where nothing but headers can be installed, and the
/// project must build there, too.
///
/// It is zip's, as torch.save's records have it. The sidecar has the same one, so that each byte is summed once for both.
std::uint32_t crc32(std::uint32_t crc, std::span<const char> data);

/// The checksum of A and B one after the other, from theirs and B's length in bytes: parts can be computed in any order and in parallel.
std::uint32_t combine_crc32(std::uint32_t crc_a, std::uint32_t crc_b, std::uint64_t length_b);

namespace detail {
/// A way to compute it. `update` goes from register to register: without the inversions of all bits before and after.
struct Crc32Way {
  std::string_view name;
  std::uint32_t (*update)(std::uint32_t state, const char* data, std::size_t length);
};
/// All that this processor has, from the slowest, which every one has, to the fastest.
std::vector<Crc32Way> crc32_ways();
}  // namespace detail

}  // namespace fsdp::ckpt
