#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace fsdp::comm {

/// Decides which parts of a collective are copied into one message for each peer, and back. They are small, so a message of their own would
/// cost more than the copies. The decision depends only on the sizes of the parts and of the row, which are the same on all ranks.
class PackedParts {
 public:
  struct Entry {
    std::size_t part;
    std::int64_t offset;  ///< The offset of one rank's shard in the message, bytes: a multiple of 16.
    std::int64_t bytes;   ///< The size of one rank's shard.
  };

  /// `shard_bytes`: the size of one rank's shard of each part; 0 for parts that are not sent.
  PackedParts(std::span<const std::int64_t> shard_bytes, int ranks);

  const std::vector<Entry>& together() const { return together_; }
  /// The parts that have messages of their own.
  const std::vector<std::size_t>& alone() const { return alone_; }
  /// The size of the message; 0 if there is none.
  std::int64_t bytes() const { return bytes_; }

 private:
  std::vector<Entry> together_;
  std::vector<std::size_t> alone_;
  std::int64_t bytes_ = 0;
};

}  // namespace fsdp::comm
