#include "comm/pairwise_communicator.h"

#include <vector>

#include "comm/pieces.h"
#include "comm/rank_order_sum.h"
#include "comm/transfers.h"

namespace fsdp::comm {
namespace {

// Rank r first exchanges with its neighbours, then with those further away: no rank is everybody's first peer.
int nth_source(const Row& row, int k) { return (row.rank + k) % row.size(); }
int nth_target(const Row& row, int k) { return (row.rank + row.size() - k) % row.size(); }

class PairwiseGather final : public GroupPending {
 public:
  PairwiseGather(std::shared_ptr<Group> group, const Call& call, const Label& label, std::span<const GatherPiece> pieces)
      : GroupPending(std::move(group), call, label), transfers_(*group_), pieces_(pieces.begin(), pieces.end()) {}
  ~PairwiseGather() override { settle(); }

 protected:
  void post() override {
    const Row& row = group_->row;
    const std::size_t messages = pieces_.size() * static_cast<std::size_t>(row.size() - 1);
    transfers_.reserve(messages, messages);
    for (std::size_t i = 0; i < pieces_.size(); ++i) {
      const std::int64_t numel = pieces_[i].shard.numel();
      if (numel == 0) continue;
      for (int k = 1; k < row.size(); ++k) {
        const int peer = nth_source(row, k);
        transfers_.receive(flat_view(pieces_[i].full, peer * numel, numel), peer, tags::data(call_, i));
      }
    }
    for (std::size_t i = 0; i < pieces_.size(); ++i) {
      const std::int64_t numel = pieces_[i].shard.numel();
      if (numel == 0) continue;
      for (int k = 1; k < row.size(); ++k) transfers_.send(flat_view(pieces_[i].shard, 0, numel), nth_target(row, k), tags::data(call_, i));
    }
    for (const GatherPiece& piece : pieces_) copy_own_shard(piece, row.rank);  // While the messages travel.
  }
  void finish() override {
    transfers_.wait_receives();
    transfers_.wait_sends();
  }
  void forget() noexcept override { transfers_.forget(); }

 private:
  Transfers transfers_;
  const std::vector<GatherPiece> pieces_;
};

class PairwiseReduce final : public GroupPending {
 public:
  PairwiseReduce(std::shared_ptr<Group> group, const Call& call, const Label& label, std::span<const ReducePiece> pieces, double scale)
      : GroupPending(std::move(group), call, label),
        transfers_(*group_),
        pieces_(pieces.begin(), pieces.end()),
        sources_(static_cast<std::size_t>(group_->row.size())),
        scale_(scale) {}
  ~PairwiseReduce() override { settle(); }

 protected:
  void post() override {
    const Row& row = group_->row;
    const std::size_t messages = pieces_.size() * static_cast<std::size_t>(row.size() - 1);
    transfers_.reserve(messages, messages);
    for (std::size_t i = 0; i < pieces_.size(); ++i) {
      const std::int64_t numel = pieces_[i].out.numel();
      if (numel == 0) continue;
      for (int k = 1; k < row.size(); ++k) {
        const int peer = nth_source(row, k);
        transfers_.receive(flat_view(pieces_[i].staging, staging_slot(peer) * numel, numel), peer, tags::data(call_, i));
      }
    }
    for (std::size_t i = 0; i < pieces_.size(); ++i) {
      const std::int64_t numel = pieces_[i].out.numel();
      if (numel == 0) continue;
      for (int k = 1; k < row.size(); ++k) {
        const int peer = nth_target(row, k);
        transfers_.send(flat_view(pieces_[i].unreduced, peer * numel, numel), peer, tags::data(call_, i));
      }
    }
  }

  // Sums each piece as soon as it is here, while those behind it travel.
  void finish() override {
    std::size_t receives = 0;
    for (const ReducePiece& piece : pieces_) {
      if (piece.out.numel() == 0) continue;
      receives += sources_.size() - 1;
      transfers_.wait_receives(receives);
      sum(piece);
    }
    transfers_.wait_sends();
  }
  void forget() noexcept override { transfers_.forget(); }

 private:
  // Staging holds the peers' pieces in rank order, without a hole for this rank's.
  std::int64_t staging_slot(int peer) const { return peer < group_->row.rank ? peer : peer - 1; }

  void sum(const ReducePiece& piece) {
    const int own = group_->row.rank;
    const std::int64_t bytes = piece.out.numel() * static_cast<std::int64_t>(piece.unreduced.itemsize());
    for (int rank = 0; rank < group_->row.size(); ++rank) {
      const at::Tensor& from = rank == own ? piece.unreduced : piece.staging;
      const std::int64_t slot = rank == own ? own : staging_slot(rank);
      sources_[static_cast<std::size_t>(rank)] = static_cast<const char*>(from.const_data_ptr()) + slot * bytes;
    }
    rank_order_sum(sources_, piece.unreduced.scalar_type(), piece.out.mutable_data_ptr(), piece.out.scalar_type(), piece.out.numel(),
                   scale_, piece.accumulate);
  }

  Transfers transfers_;
  const std::vector<ReducePiece> pieces_;
  std::vector<const void*> sources_;
  const double scale_;
};

class PairwiseScatter final : public GroupPending {
 public:
  PairwiseScatter(std::shared_ptr<Group> group, const Call& call, const Label& label, std::span<const ScatterPiece> pieces, int root)
      : GroupPending(std::move(group), call, label), transfers_(*group_), pieces_(pieces.begin(), pieces.end()), root_(root) {}
  ~PairwiseScatter() override { settle(); }

 protected:
  void post() override {
    const Row& row = group_->row;
    for (std::size_t i = 0; i < pieces_.size(); ++i) {
      const ScatterPiece& piece = pieces_[i];
      if (row.rank != root_) {
        if (piece.into.numel() > 0) transfers_.receive(flat_view(piece.into, 0, piece.into.numel()), root_, tags::data(call_, i));
        continue;
      }
      for (int k = 1; k < row.size(); ++k) {
        const int peer = nth_target(row, k);
        const at::Tensor& part = piece.parts[static_cast<std::size_t>(peer)];
        if (part.numel() > 0) transfers_.send(flat_view(part, 0, part.numel()), peer, tags::data(call_, i));
      }
      copy_own_part(piece, root_);
    }
  }
  void finish() override {
    transfers_.wait_receives();
    transfers_.wait_sends();
  }
  void forget() noexcept override { transfers_.forget(); }

 private:
  Transfers transfers_;
  const std::vector<ScatterPiece> pieces_;
  const int root_;
};

}  // namespace

std::unique_ptr<Pending> PairwiseCommunicator::all_gather(std::span<const GatherPiece> pieces, const Label& label) {
  const std::int64_t bytes = check_pieces(pieces, size());
  const Call call = begin(label, bytes, sizes_of(pieces));
  auto pending = std::make_unique<PairwiseGather>(group(), call, label, pieces);
  pending->start();
  stats_.all_gather_bytes += (size() - 1) * bytes;
  ++stats_.all_gathers;
  return pending;
}

std::unique_ptr<Pending> PairwiseCommunicator::reduce_scatter(std::span<const ReducePiece> pieces, double scale, const Label& label) {
  const std::int64_t bytes = check_pieces(pieces, *this);
  const Call call = begin(label, bytes, sizes_of(pieces));
  auto pending = std::make_unique<PairwiseReduce>(group(), call, label, pieces, scale);
  pending->start();
  stats_.reduce_scatter_bytes += (size() - 1) * bytes;
  ++stats_.reduce_scatters;
  return pending;
}

std::unique_ptr<Pending> PairwiseCommunicator::scatter(std::span<const ScatterPiece> pieces, int root, const Label& label) {
  const std::int64_t bytes = check_pieces(pieces, root, *this);
  const Call call = begin(label, 0, mix(pieces.size(), static_cast<std::uint64_t>(root)));  // the ranks' parts differ in size
  auto pending = std::make_unique<PairwiseScatter>(group(), call, label, pieces, root);
  pending->start();
  stats_.scatter_bytes += bytes;
  ++stats_.scatters;
  return pending;
}

}  // namespace fsdp::comm
