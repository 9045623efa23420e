#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>

#include "fsdp/grad_comm_format.h"

// GradCommFormat for tensors: loops on the CPU, a kernel on devices that have one (rounded_arithmetic.h), and otherwise operators. The
// results have the same bits, except for the sign of zeros.
namespace fsdp {

/// Contributions of one sender to all receivers, which are encoded, or of all senders to one receiver, which are decoded. Senders and
/// receivers are numbers of ranks, or of hosts. `own` is the number of the one sender, or of the one receiver.
struct RoundedRows {
  at::Tensor values;     ///< [numbers, padded_numel(numel)] in fp32. The row `own` is neither read nor written.
  at::Tensor encoded;    ///< [numbers - 1, encoded_bytes(numel)], kByte: the rows without `own`.
  at::Tensor lost = {};  ///< [numbers - 1, numel] in fp32, or undefined; see encode_blocks(). Rows may lie apart.
  std::int64_t numel = 0;
  std::int64_t own = 0;
  std::int64_t first = 0;            ///< The number of the first block.
  std::uint64_t key = 0;             ///< Mixed with the numbers of a sender and a receiver, it is the key of that contribution.
  at::Tensor reduction_number = {};  ///< int64, without dimensions, on the device of `values`: mixed into `key` before. Or undefined.
};

/// Encodes contributions, on the current stream. Overwrites `values`.
void encode_rows(const GradCommFormat& format, std::span<const RoundedRows> all);

/// Decodes contributions into `values`.
void decode_rows(const GradCommFormat& format, std::span<const RoundedRows> all);

/// Returns the Hadamard transform of the last dimension, with the bits of hadamard_transform.
at::Tensor hadamard_by_operators(const at::Tensor& blocks);

}  // namespace fsdp
