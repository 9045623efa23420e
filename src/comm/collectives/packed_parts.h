#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace fsdp::comm {

/// Which parts of a collective travel in one message for each peer, copied there and back: a message of their own would cost more. The
/// sizes of parts and row decide, which are the same on all ranks.
class PackedParts {
 public:
  struct Entry {
    std::size_t part;
    std::int64_t offset;  ///< Of one rank's shard in the message, bytes: a multiple of 16.
    std::int64_t bytes;   ///< Of one rank's shard.
  };

  /// `shard_bytes`: of one rank's shard of each part, 0 where nothing travels.
  PackedParts(std::span<const std::int64_t> shard_bytes, int ranks);

  const std::vector<Entry>& together() const { return together_; }
  /// The parts that have messages of their own.
  const std::vector<std::size_t>& alone() const { return alone_; }
  /// Of the message, 0 if there is none.
  std::int64_t bytes() const { return bytes_; }

 private:
  std::vector<Entry> together_;
  std::vector<std::size_t> alone_;
  std::int64_t bytes_ = 0;
};

}  // namespace fsdp::comm
