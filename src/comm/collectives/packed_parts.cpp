#include "comm/collectives/packed_parts.h"

namespace fsdp::comm {
namespace {

// Of all ranks' shards of a part. A message costs some 100 us of processor time on both sides, as much as copying it there and back.
constexpr std::int64_t kSmallBytes = 256 * 1024;
constexpr std::int64_t kAlignment = 16;  // of any element's type

}  // namespace

PackedParts::PackedParts(std::span<const std::int64_t> shard_bytes, int ranks) {
  for (std::size_t i = 0; i < shard_bytes.size(); ++i) {
    const auto bytes = shard_bytes[i];
    if (bytes == 0) continue;
    if (bytes * ranks > kSmallBytes) {
      alone_.push_back(i);
      continue;
    }
    together_.push_back({.part = i, .offset = bytes_, .bytes = bytes});
    bytes_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  if (together_.size() > 1) return;
  // One alone needs no copies.
  for (const auto& entry : together_) alone_.push_back(entry.part);
  together_.clear();
  bytes_ = 0;
}

}  // namespace fsdp::comm
