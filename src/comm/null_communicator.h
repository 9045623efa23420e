#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/traffic.h"

namespace fsdp::comm {

class NullCommunicator;

/// Callbacks for the gathers and reductions that are called on a NullCommunicator, and for the first wait for each of them.
class CollectiveListener {
 public:
  virtual ~CollectiveListener() = default;
  /// Returns the number by which waited() will name the collective.
  virtual std::size_t posted(const NullCommunicator& row, const Sent& sent, const Label& label) = 0;
  virtual void waited(std::size_t number) = 0;
};

/// A row of any size in which nothing moves: collectives return at once, leave all buffers as they are, and count the bytes that a real
/// communicator would send, by default in messages between all pairs. It is used for plans, and to measure host time and memory for worlds
/// that are larger than the available machines.
class NullCommunicator : public Communicator {
 public:
  NullCommunicator(int rank, int size) : NullCommunicator(rank, size, Traffic::by_messages(size)) {}
  /// `stride`: the difference of the global ranks of neighbours in the row.
  NullCommunicator(int rank, int size, Traffic traffic, std::int64_t stride = 1)
      : rank_(rank), size_(size), traffic_(traffic), stride_(stride) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::int64_t staging_numel(std::int64_t shard_numel) const override {
    return std::max(staging_numel(shard_numel, at::kHalf), staging_numel(shard_numel, at::kFloat));
  }
  std::int64_t staging_numel(std::int64_t shard_numel, at::ScalarType wire_dtype) const override {
    return size_ == 1 ? 0 : traffic_.staging_numel(shard_numel, wire_dtype);
  }
  Traffic traffic() const override { return traffic_; }
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

  std::int64_t stride() const { return stride_; }
  /// Notifies `listener` of all collectives from now on, as long as it exists. Null: no listener.
  void tell(CollectiveListener* listener) { listener_ = listener; }

 private:
  std::unique_ptr<Pending> post(const Sent& sent, const Label& label);

  const int rank_;
  const int size_;
  const Traffic traffic_;
  const std::int64_t stride_;
  CollectiveListener* listener_ = nullptr;
};

}  // namespace fsdp::comm
