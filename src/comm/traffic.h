#pragma once

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstdint>

#include "fsdp/grad_comm_format.h"

// The bytes that the collectives of a row send, and the bytes that they need beside the callers' buffers. This is pure arithmetic, which
// communicators follow, and which plans use for rows that do not exist.
namespace fsdp::comm {

/// The bytes that a rank sends in a gather or a reduction.
struct Sent {
  std::int64_t wire = 0;
  std::int64_t shared_memory = 0;  ///< The bytes that peers read from this rank's memory.
};

/// How a row sums bfloat16 or half by a backend's messages (MessageSum): all ranks send each other what they sum, or, in two levels, first
/// the ranks within each host, and then ranks of equal place, whose messages are the hosts' sums. For each element of a shard: how many
/// elements this sends and needs.
struct SumLevels {
  std::int64_t ranks = 1;  ///< On each host; all ranks of the row if there is one level.
  std::int64_t hosts = 1;  ///< 1: one level.

  static constexpr std::int64_t kPieceStaging = std::int64_t{1} << 24;  ///< 32 MiB.
  std::int64_t piece_staging = kPieceStaging;                           ///< Elements of staging for a piece of a large shard.

  static constexpr std::int64_t kSumElements = 2;  ///< Elements of bfloat16 or half that take as many bytes as a sum in fp32.

  /// One level if that is as good: on one host, and with one or two ranks on each host, where two bfloat16 values take as many bytes as one
  /// fp32 sum. `ranks_per_host`: see the function of that name.
  static SumLevels of(int size, int ranks_per_host, std::int64_t piece_staging = kPieceStaging);
  /// [Rounded once] For contributions that are encoded. Two levels wherever hosts have several ranks, so that one contribution of a host
  /// crosses; otherwise each rank counts as a host.
  static SumLevels of_rounded(int size, int ranks_per_host, std::int64_t piece_staging = kPieceStaging);

  bool are_two() const { return hosts > 1; }
  std::int64_t staging_per_element() const {
    return are_two() ? kSumElements * hosts + std::max(unreduced_per_element(), kSumElements * sums_per_element())
                     : unreduced_per_element();
  }
  std::int64_t unreduced_per_element() const { return (ranks - 1) * hosts; }  ///< Elements that are sent unreduced.
  std::int64_t sums_per_element() const { return hosts - 1; }                 ///< Sums that are sent.

  /// Returns how many elements of a shard are sent and summed at once. A large shard is divided into pieces of this size, and there is
  /// staging for two of them.
  std::int64_t piece_numel(std::int64_t shard_numel) const;
  std::int64_t staging_numel(std::int64_t shard_numel) const {
    return staging_per_element() * std::min(shard_numel, 2 * piece_numel(shard_numel));
  }

  /// The same for contributions of gradients of `dtype` that are encoded: elements of a piece, which are complete blocks; the bytes of
  /// staging for one; and those for a reduction. A piece has an fp32 row for each host. Behind the rows lie the gradients of the
  /// neighbours, and later what the hosts send each other.
  std::int64_t rounded_piece_numel(std::int64_t shard_numel, const GradCommFormat& format, at::ScalarType dtype) const;
  std::int64_t rounded_piece_bytes(std::int64_t numel, const GradCommFormat& format, at::ScalarType dtype) const;
  std::int64_t rounded_staging_bytes(std::int64_t shard_numel, const GradCommFormat& format, at::ScalarType dtype) const;
};

/// How the collectives of a row move bytes.
class Traffic {
 public:
  /// By messages between all pairs of ranks.
  static Traffic by_messages(int size);
  /// By memory that the ranks of a host share; between hosts, by messages between ranks of equal place.
  static Traffic by_shared_memory(int size, int ranks_per_host);
  /// By a backend's own collectives (NCCL), and by messages for sums that it does not make; see SumLevels.
  static Traffic by_backend(int size, int ranks_per_host, std::int64_t piece_staging = SumLevels::kPieceStaging);

  /// Elements of staging that a reduction of shards of `shard_numel` elements needs, in the dtype of the wire.
  std::int64_t staging_numel(std::int64_t shard_numel, at::ScalarType wire_dtype) const;
  /// [Rounded once] Returns how many contributions a rank sends in a reduction with a GradCommFormat: one to each other rank or, if the
  /// ranks of a host sum first, one to each other host.
  std::int64_t contributions() const;
  /// Returns the bytes of staging for such a reduction of gradients of `dtype`.
  std::int64_t staging_bytes(std::int64_t shard_numel, const GradCommFormat& format, at::ScalarType dtype) const;
  /// Returns what such a reduction sends. `bytes` is as in sent(), and `encoded_bytes` is the size of a contribution, over all parts.
  Sent sent_encoded(std::int64_t bytes, std::int64_t encoded_bytes) const;

  /// `bytes` is the size of a shard, over all parts; `summed_bytes` is the size of its sums before they are rounded.
  Sent sent(std::int64_t bytes, std::int64_t summed_bytes) const;

 private:
  enum class Way : std::uint8_t { kMessages, kSharedMemory, kBackend };
  Traffic(Way way, std::int64_t size, std::int64_t hosts, const SumLevels& levels = {}, const SumLevels& rounded_levels = {})
      : way_(way), size_(size), hosts_(hosts), levels_(levels), rounded_levels_(rounded_levels) {}

  Way way_;
  std::int64_t size_;
  std::int64_t hosts_;
  SumLevels levels_;
  SumLevels rounded_levels_;
};

/// True if a backend adds up gradients of this dtype itself. Others are summed by the ranks, in fp32.
bool backend_sums(at::ScalarType dtype);

}  // namespace fsdp::comm
