#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

namespace fsdp::weights {

/// Ranks that may die tell each other where they are, through the store of their process group, all of whose meetings they count alike. A
/// collective can't: Gloo closes the connections of all ranks when one of them waits for too long, and does not say for whom.
///
/// [Note: One verdict] A rank for which others have waited too long may come at that very moment. So each rank proposes what it has seen,
/// and the store keeps the first proposal, which all ranks take.
///
/// Not thread-safe.
class Meetings {
 public:
  /// `store`: that of the group; null for a group of one rank.
  Meetings(c10::intrusive_ptr<c10d::Store> store, int rank, int size) : store_(std::move(store)), rank_(rank), size_(size) {}

  /// Returns what each rank has said, once all have come. Every rank of the group calls it. The first rank, which serves the store of most
  /// groups, returns last, so that it may end then. Throws CommError on all ranks that come, if a
  /// rank did not in this time, with its number; or if the store is gone.
  std::vector<std::string> meet(const std::string& said, std::chrono::milliseconds timeout);

  /// How many there were.
  std::int64_t count() const { return count_; }
  int rank() const { return rank_; }
  int size() const { return size_; }

 private:
  std::vector<std::string> meet_at(std::int64_t number, const std::string& said, std::chrono::milliseconds timeout);

  void leave(std::int64_t number, std::chrono::milliseconds timeout);

  const c10::intrusive_ptr<c10d::Store> store_;
  const int rank_;
  const int size_;
  std::int64_t count_ = 0;
};

}  // namespace fsdp::weights
