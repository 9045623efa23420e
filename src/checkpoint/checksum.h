#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace fsdp::ckpt {

/// Continues a CRC-32: `crc` is the checksum of the bytes before `data` (0 at the beginning), and the result is the checksum of all bytes
/// so far. For bytes in its cache, one core computes about 15 GB/s where it can multiply 128 bits without carry (x86-64 since 2010), and
/// 2 GB/s elsewhere.
///
/// The project has its own code for this, although libraries exist: the fast one in Debian (ISA-L) is missing where only headers can be
/// installed, and the project must build there, too.
///
/// The polynomial is zip's, which the records of torch.save use. The sidecar uses it, too, so each byte is summed only once for both.
std::uint32_t crc32(std::uint32_t crc, std::span<const char> data);

/// Returns the checksum of A followed by B, from the checksums of both and the length of B in bytes. Parts can therefore be summed in any
/// order and in parallel.
std::uint32_t combine_crc32(std::uint32_t crc_a, std::uint32_t crc_b, std::uint64_t length_b);

namespace detail {
/// One way to compute the checksum. `update` maps the CRC register to its next value, without the inversions of all bits at the beginning
/// and the end.
struct Crc32Way {
  std::string_view name;
  std::uint32_t (*update)(std::uint32_t state, const char* data, std::size_t length);
};
/// The ways that this processor supports, from the slowest, which every processor supports, to the fastest.
std::vector<Crc32Way> crc32_ways();
}  // namespace detail

}  // namespace fsdp::ckpt
