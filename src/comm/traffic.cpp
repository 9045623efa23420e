#include "comm/traffic.h"

#include <algorithm>

#include "base/rounded_blocks.h"
#include "comm/rank_order_sum.h"

namespace fsdp::comm {

SumLevels SumLevels::of(int size, int ranks_per_host, std::int64_t piece_staging) {
  if (ranks_per_host <= 2 || ranks_per_host == size) return {.ranks = size, .piece_staging = piece_staging};
  return {.ranks = ranks_per_host, .hosts = size / ranks_per_host, .piece_staging = piece_staging};
}

SumLevels SumLevels::of_rounded(int size, int ranks_per_host, std::int64_t piece_staging) {
  const int ranks = ranks_per_host < size ? ranks_per_host : 1;
  return {.ranks = ranks, .hosts = size / ranks, .piece_staging = piece_staging};
}

std::int64_t SumLevels::piece_numel(std::int64_t shard_numel) const {
  constexpr std::int64_t kAligned = 16;  // Elements, so that kernels read pieces as they read whole shards.
  // However many ranks there are, a message has at least 1/512 of a piece's staging.
  const std::int64_t fits = piece_staging / std::max<std::int64_t>(staging_per_element(), 1);
  const std::int64_t piece = std::max({fits, piece_staging / 512, kAligned}) / kAligned * kAligned;
  return shard_numel <= 2 * piece ? shard_numel : piece;
}

std::int64_t SumLevels::rounded_piece_numel(std::int64_t shard_numel, const GradCommFormat& format, at::ScalarType dtype) const {
  const std::int64_t bytes = piece_staging * static_cast<std::int64_t>(elementSize(at::kHalf));
  const std::int64_t of_block = std::max<std::int64_t>(rounded_piece_bytes(format.block, format, dtype), 1);
  const std::int64_t piece = std::max({bytes / of_block, piece_staging / 512 / format.block, std::int64_t{1}}) * format.block;
  return shard_numel <= 2 * piece ? shard_numel : piece;
}

std::int64_t SumLevels::rounded_piece_bytes(std::int64_t numel, const GradCommFormat& format, at::ScalarType dtype) const {
  constexpr std::int64_t kAligned = 16;  // so that kernels read rows as they read whole shards
  if (!are_two()) return 0;
  const std::int64_t rows = hosts * padded_numel(format, numel) * static_cast<std::int64_t>(sizeof(float));
  const std::int64_t of_neighbours = unreduced_per_element() * numel * static_cast<std::int64_t>(elementSize(dtype));
  const std::int64_t of_hosts = 2 * sums_per_element() * encoded_bytes(format, numel);
  return (rows + std::max(of_neighbours, of_hosts) + kAligned - 1) / kAligned * kAligned;
}

std::int64_t SumLevels::rounded_staging_bytes(std::int64_t shard_numel, const GradCommFormat& format, at::ScalarType dtype) const {
  const std::int64_t piece = rounded_piece_numel(shard_numel, format, dtype);
  return (piece < shard_numel ? 2 : 1) * rounded_piece_bytes(piece, format, dtype);
}

bool backend_sums(at::ScalarType dtype) { return dtype == at::kFloat || dtype == at::kDouble; }

Traffic Traffic::by_messages(int size) { return {Way::kMessages, size, size}; }

Traffic Traffic::by_shared_memory(int size, int ranks_per_host) { return {Way::kSharedMemory, size, size / ranks_per_host}; }

Traffic Traffic::by_backend(int size, int ranks_per_host, std::int64_t piece_staging) {
  return {Way::kBackend, size, size, SumLevels::of(size, ranks_per_host, piece_staging),
          SumLevels::of_rounded(size, ranks_per_host, piece_staging)};
}

std::int64_t Traffic::staging_numel(std::int64_t shard_numel, at::ScalarType wire_dtype) const {
  switch (way_) {
    case Way::kMessages:
      return (size_ - 1) * shard_numel;
    case Way::kSharedMemory:
      if (hosts_ == 1) return 0;
      return (2 * hosts_ - 1) * shard_numel * static_cast<std::int64_t>(elementSize(sum_dtype(wire_dtype)) / elementSize(wire_dtype));
    case Way::kBackend:
      if (backend_sums(wire_dtype)) return shard_numel;
      return levels_.staging_numel(shard_numel);
  }
  return 0;
}

Sent Traffic::sent(std::int64_t bytes, std::int64_t summed_bytes) const {
  if (way_ == Way::kSharedMemory) return {.wire = (hosts_ - 1) * summed_bytes, .shared_memory = (size_ / hosts_ - 1) * hosts_ * bytes};
  if (!levels_.are_two()) return {.wire = (size_ - 1) * bytes};
  const std::int64_t narrow = summed_bytes - bytes;  // Their sums need twice as many.
  return {.wire = (size_ - 1) * (bytes - narrow) + levels_.unreduced_per_element() * narrow + levels_.sums_per_element() * 2 * narrow};
}

std::int64_t Traffic::contributions() const {
  if (way_ == Way::kBackend) return rounded_levels_.sums_per_element();
  return (way_ == Way::kSharedMemory ? hosts_ : size_) - 1;
}

// For contributions that are sent, and those that are received. A host's own sum is not encoded.
std::int64_t Traffic::staging_bytes(std::int64_t shard_numel, const GradCommFormat& format, at::ScalarType dtype) const {
  if (way_ == Way::kBackend) return rounded_levels_.rounded_staging_bytes(shard_numel, format, dtype);
  const bool has_own_sum = way_ == Way::kSharedMemory && hosts_ > 1;
  return 2 * contributions() * encoded_bytes(format, shard_numel) +
         (has_own_sum ? shard_numel * static_cast<std::int64_t>(sizeof(float)) : 0);
}

Sent Traffic::sent_encoded(std::int64_t bytes, std::int64_t encoded_bytes) const {
  const std::int64_t wire = contributions() * encoded_bytes;
  if (way_ == Way::kBackend) return {.wire = wire + rounded_levels_.unreduced_per_element() * bytes};
  return {.wire = wire, .shared_memory = sent(bytes, bytes).shared_memory};
}

}  // namespace fsdp::comm
