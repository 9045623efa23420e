#include "comm/pairwise_communicator.h"

#include <vector>

#include "comm/parts.h"
#include "comm/rank_order_sum.h"
#include "comm/transfers.h"

namespace fsdp::comm {
namespace {

// Rank r first exchanges with its neighbours, then with those further away: no rank is everybody's first peer.
int nth_source(const Row& row, int k) { return (row.rank + k) % row.size(); }
int nth_target(const Row& row, int k) { return (row.rank + row.size() - k) % row.size(); }

class PairwiseGather final : public GroupPending {
 public:
  PairwiseGather(std::shared_ptr<Group> group, const Call& call, const Label& label, std::span<const GatherPart> parts)
      : GroupPending(std::move(group), call, label), transfers_(*group_), parts_(parts.begin(), parts.end()) {}
  ~PairwiseGather() override { settle(); }

 protected:
  void post() override {
    const Row& row = group_->row;
    const std::size_t messages = parts_.size() * static_cast<std::size_t>(row.size() - 1);
    transfers_.reserve(messages, messages);
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      const std::int64_t numel = parts_[i].shard.numel();
      if (numel == 0) continue;
      for (int k = 1; k < row.size(); ++k) {
        const int peer = nth_source(row, k);
        transfers_.receive(flat_view(parts_[i].full, peer * numel, numel), peer, tags::data(call_, i));
      }
    }
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      const std::int64_t numel = parts_[i].shard.numel();
      if (numel == 0) continue;
      for (int k = 1; k < row.size(); ++k) transfers_.send(flat_view(parts_[i].shard, 0, numel), nth_target(row, k), tags::data(call_, i));
    }
    for (const GatherPart& part : parts_) copy_own_shard(part, row.rank);  // While the messages travel.
  }
  void finish() override {
    transfers_.wait_receives();
    transfers_.wait_sends();
  }
  void forget() noexcept override { transfers_.forget(); }

 private:
  Transfers transfers_;
  const std::vector<GatherPart> parts_;
};

class PairwiseReduce final : public GroupPending {
 public:
  PairwiseReduce(std::shared_ptr<Group> group, const Call& call, const Label& label, std::span<const ReducePart> parts, double scale)
      : GroupPending(std::move(group), call, label),
        transfers_(*group_),
        parts_(parts.begin(), parts.end()),
        sources_(static_cast<std::size_t>(group_->row.size())),
        scale_(scale) {}
  ~PairwiseReduce() override { settle(); }

 protected:
  void post() override {
    const Row& row = group_->row;
    const std::size_t messages = parts_.size() * static_cast<std::size_t>(row.size() - 1);
    transfers_.reserve(messages, messages);
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      const std::int64_t numel = parts_[i].out.numel();
      if (numel == 0) continue;
      for (int k = 1; k < row.size(); ++k) {
        const int peer = nth_source(row, k);
        transfers_.receive(flat_view(parts_[i].staging, staging_slot(peer) * numel, numel), peer, tags::data(call_, i));
      }
    }
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      const std::int64_t numel = parts_[i].out.numel();
      if (numel == 0) continue;
      for (int k = 1; k < row.size(); ++k) {
        const int peer = nth_target(row, k);
        transfers_.send(flat_view(parts_[i].unreduced, peer * numel, numel), peer, tags::data(call_, i));
      }
    }
  }

  // Sums each part as soon as it is here, while those behind it travel.
  void finish() override {
    std::size_t receives = 0;
    for (const ReducePart& part : parts_) {
      if (part.out.numel() == 0) continue;
      receives += sources_.size() - 1;
      transfers_.wait_receives(receives);
      sum(part);
    }
    transfers_.wait_sends();
  }
  void forget() noexcept override { transfers_.forget(); }

 private:
  // Staging holds the peers' parts in rank order, without a hole for this rank's.
  std::int64_t staging_slot(int peer) const { return peer < group_->row.rank ? peer : peer - 1; }

  void sum(const ReducePart& part) {
    const int own = group_->row.rank;
    const std::int64_t bytes = part.out.numel() * static_cast<std::int64_t>(part.unreduced.itemsize());
    for (int rank = 0; rank < group_->row.size(); ++rank) {
      const at::Tensor& from = rank == own ? part.unreduced : part.staging;
      const std::int64_t slot = rank == own ? own : staging_slot(rank);
      sources_[static_cast<std::size_t>(rank)] = static_cast<const char*>(from.const_data_ptr()) + slot * bytes;
    }
    rank_order_sum(sources_, part.unreduced.scalar_type(), part.out.mutable_data_ptr(), part.out.scalar_type(), part.out.numel(), scale_,
                   part.accumulate);
  }

  Transfers transfers_;
  const std::vector<ReducePart> parts_;
  std::vector<const void*> sources_;
  const double scale_;
};

class PairwiseScatter final : public GroupPending {
 public:
  PairwiseScatter(std::shared_ptr<Group> group, const Call& call, const Label& label, std::span<const ScatterPart> parts, int root)
      : GroupPending(std::move(group), call, label), transfers_(*group_), parts_(parts.begin(), parts.end()), root_(root) {}
  ~PairwiseScatter() override { settle(); }

 protected:
  void post() override {
    const Row& row = group_->row;
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      const ScatterPart& part = parts_[i];
      if (row.rank != root_) {
        if (part.into.numel() > 0) transfers_.receive(flat_view(part.into, 0, part.into.numel()), root_, tags::data(call_, i));
        continue;
      }
      for (int k = 1; k < row.size(); ++k) {
        const int peer = nth_target(row, k);
        const at::Tensor& shard = part.shards[static_cast<std::size_t>(peer)];
        if (shard.numel() > 0) transfers_.send(flat_view(shard, 0, shard.numel()), peer, tags::data(call_, i));
      }
      copy_root_shard(part, root_);
    }
  }
  void finish() override {
    transfers_.wait_receives();
    transfers_.wait_sends();
  }
  void forget() noexcept override { transfers_.forget(); }

 private:
  Transfers transfers_;
  const std::vector<ScatterPart> parts_;
  const int root_;
};

}  // namespace

std::unique_ptr<GroupPending> PairwiseCommunicator::make_gather(const Call& call, const Label& label, std::span<const GatherPart> parts) {
  return std::make_unique<PairwiseGather>(group(), call, label, parts);
}

std::unique_ptr<GroupPending> PairwiseCommunicator::make_reduce(const Call& call, const Label& label, std::span<const ReducePart> parts,
                                                                double scale) {
  return std::make_unique<PairwiseReduce>(group(), call, label, parts, scale);
}

std::unique_ptr<GroupPending> PairwiseCommunicator::make_scatter(const Call& call, const Label& label, std::span<const ScatterPart> parts,
                                                                 int root) {
  return std::make_unique<PairwiseScatter>(group(), call, label, parts, root);
}

}  // namespace fsdp::comm
