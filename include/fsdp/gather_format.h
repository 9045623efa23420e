#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>

namespace fsdp {

/// The format in which a parameter is all-gathered, if not in its compute dtype: a pair of conversions of blocks of elements. Blocks are
/// counted from the parameter's start and never lie on two ranks, so the result does not depend on the strategy or the number of ranks.
/// Padding between parameters is converted, too; its value is 0. (FSDP2's fsdp_pre_all_gather and fsdp_post_all_gather.)
struct GatherFormat {
  /// Elements per block; at least 1.
  std::int64_t block = 1;
  /// Bytes per block as it is sent.
  std::int64_t block_bytes = 0;
  /// Writes `wire` (2-D, uint8, [pieces, bytes]) from `main` (2-D, the main parameters' dtype, [pieces, elements]; a view). Each row is one
  /// piece, which consists of complete blocks and is converted separately. Both are contiguous.
  std::function<void(const at::Tensor& main, const at::Tensor& wire)> pre_all_gather;
  /// Writes `whole` (2-D, the compute dtype, [pieces, elements]) from `wire` (2-D, uint8, [pieces, bytes]).
  std::function<void(const at::Tensor& wire, const at::Tensor& whole)> post_all_gather;
  /// If true, gathers send the difference between the main parameters and the unsharded ones. `main` of pre_all_gather is then this
  /// difference (fp32), and post_all_gather adds what has arrived to `whole`, with the same bits on all ranks. The first gather, and the
  /// first one after main parameters were written by anything else than an optimizer's step (a load, SummonFullParams), sends the
  /// parameters in the compute dtype instead. Requires parameters that stay unsharded: placements `optim` or `optim_grads`; otherwise
  /// fully_shard throws Error.
  bool differences = false;
  /// What ranks compare in addition to the sizes.
  std::string settings = {};
};

/// Eight bits per element: float8_e4m3fn with one power-of-two scale (e8m0, one byte) per block of elements, chosen so that the block's
/// largest magnitude does not overflow. (OCP Microscaling Formats, 2023: MXFP8, whose block is 32.) A block of 32 is sent as 33 bytes
/// instead of bf16's 64, one of 128 as 129 instead of 256. NaN and infinities become NaN. Throws Error unless block is a positive multiple
/// of 16.
GatherFormat float8_blocks(std::int64_t block = 32);

/// The options of int4_differences.
struct Int4Differences {
  std::int64_t block = 128;  ///< Elements that share a scale: a positive multiple of 16; with `hadamard`, a power of two from 16 to 256.
  bool hadamard = false;     ///< Whether each block is sent as its Hadamard transform, which spreads outliers over the block.
};

/// Gathers send differences to the unsharded parameters in four bits per element: an integer from -7 to 7, with one scale in bfloat16 per
/// block of elements (SDP4Bit, 2024). A block of 128 is sent as 66 bytes instead of fp32's 512 or bf16's 256. Main parameters stay exact.
/// Rounding errors do not add up, because each difference is taken to what all ranks really have. If an element of a block is NaN or
/// infinite, the complete block becomes NaN, until a gather sends the parameters themselves again. Throws Error for another block.
GatherFormat int4_differences(const Int4Differences& options = {});

}  // namespace fsdp
