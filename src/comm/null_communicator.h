#pragma once

#include <vector>

#include "comm/communicator.h"
#include "comm/traffic.h"

namespace fsdp::comm {

/// A row of any size in which nothing moves: collectives return at once, leave all buffers as they are, and count the bytes that a real
/// communicator would send, by default in messages between all pairs. It serves to plan, and to measure host time and memory for worlds
/// that are larger than the available machines.
class NullCommunicator : public Communicator {
 public:
  NullCommunicator(int rank, int size) : NullCommunicator(rank, size, Traffic::by_messages(size)) {}
  NullCommunicator(int rank, int size, Traffic traffic) : rank_(rank), size_(size), traffic_(traffic) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  /// The smallest dtype takes the largest number of elements.
  std::int64_t staging_numel(std::int64_t shard_numel) const override { return staging_numel(shard_numel, at::kHalf); }
  std::int64_t staging_numel(std::int64_t shard_numel, at::ScalarType wire_dtype) const override {
    return size_ == 1 ? 0 : traffic_.staging_numel(shard_numel, wire_dtype);
  }
  std::unique_ptr<Pending> all_gather(std::span<const GatherPart> parts, const Label& label) override;
  std::unique_ptr<Pending> reduce_scatter(std::span<const ReducePart> parts, double scale, const Label& label) override;
  std::unique_ptr<Pending> gather_uneven(std::span<const UnevenPart> parts, const std::vector<bool>& receives, const Label& label) override;
  std::unique_ptr<Pending> scatter(std::span<const ScatterPart> parts, int root, const Label& label) override;

  /// Returns this rank's value for every rank.
  at::Tensor exchange(const at::Tensor& value, const Label& label) override;
  std::string broadcast(const std::string& text, int root, const Label& label) override { return text; }
  std::string gather(const std::string& text, const Label& label) override;
  void expect_equal(const std::string& text, const Label& label) override {}
  void barrier() override {}

 private:
  const int rank_;
  const int size_;
  const Traffic traffic_;
};

}  // namespace fsdp::comm
