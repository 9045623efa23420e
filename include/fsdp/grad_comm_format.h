#pragma once

#include <cstdint>

namespace fsdp {

/// The format in which gradients are sent as messages between ranks: integers of 8 or 4 bits, with a scale for each block of elements. What
/// ranks of one host read from each other's memory, and what a rank adds to its own shard, is not rounded. With NCCL on several hosts, what
/// ranks of one host send each other is not rounded either. The scale of a block, an fp32 number, is its largest magnitude divided by 127
/// or 7. Sums run in fp32. A block with NaN or infinity becomes NaN. (ZeRO++'s qgZ; SDP4Bit, arXiv 2410.15526.)
struct GradCommFormat {
  int bits = 8;              ///< Of each element: 8 or 4.
  std::int64_t block = 128;  ///< Elements per scale: a multiple of 32. A rank's shard of a sub-buffer begins with a block.
  /// Whether a normalized Walsh-Hadamard transform is applied to each block before it is rounded, and again when it has arrived. It spreads
  /// single large values over the block. `block` must be a power of two.
  bool hadamard = false;
  /// Whether values are rounded up or down at random, so that the expected value is exact. The same on every run: the numbers depend on
  /// `seed`, the unit, how many reductions it has had, the sending and the receiving rank, and the element.
  bool stochastic_rounding = false;
  std::uint64_t seed = 0;  ///< Of stochastic rounding. The same on all ranks.
  /// Whether each rank keeps, in fp32, what rounding lost of the gradients that it has sent, and adds it to the next ones. It takes 4 bytes
  /// for each element that is sent. Checkpoints do not contain it.
  bool error_feedback = false;

  bool operator==(const GradCommFormat&) const = default;
};

}  // namespace fsdp
