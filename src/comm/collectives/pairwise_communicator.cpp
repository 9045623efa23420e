#include "comm/collectives/pairwise_communicator.h"

#include <ATen/ops/empty.h>

#include <cstring>
#include <exception>
#include <numeric>
#include <utility>
#include <vector>

#include "comm/collectives/packed_parts.h"
#include "comm/collectives/transfers.h"
#include "comm/parts.h"
#include "comm/rank_order_sum.h"
#include "comm/rounded_sum.h"

namespace fsdp::comm {
namespace {

// Each rank first exchanges with its neighbours and then with ranks that are further away, so that no rank is the first peer of all others.
int nth_source(const Row& row, int k) { return (row.rank + k) % row.size(); }
int nth_target(const Row& row, int k) { return (row.rank + row.size() - k) % row.size(); }

/// Bytes [rank * bytes, (rank + 1) * bytes) of a 1-D tensor of one dtype or another.
char* region_of(const at::Tensor& tensor, int rank, std::int64_t bytes) {
  return static_cast<char*>(tensor.mutable_data_ptr()) + rank * bytes;
}

at::Tensor bytes_for(const PackedParts& packed, int ranks) { return at::empty({ranks * packed.bytes()}, at::kByte); }

/// The common base of gathers and reductions. Each peer sends one message with all small parts, and one for each other part.
class PairwisePending : public GroupPending {
 protected:
  /// `bytes` are the sizes of each part from one rank.
  PairwisePending(std::shared_ptr<Group> group, const Call& call, const Label& label, const std::vector<std::int64_t>& bytes)
      : GroupPending(std::move(group), call, label),
        transfers_(*group_),
        packed_(bytes, group_->row.size()),
        together_(tags::data(call_, bytes.size())) {}

  /// Posts the receives from all ranks that send. `place(i, peer)` is where the peer's message with part i belongs.
  template <typename Place>
  void receive(const Place& place) {
    const Row& row = group_->row;
    const std::size_t messages = (packed_.alone().size() + 1) * static_cast<std::size_t>(row.size() - 1);
    transfers_.reserve(messages, messages);
    if (packed_.bytes() > 0) {
      received_ = bytes_for(packed_, row.size());
      for (int k = 1; k < row.size(); ++k) {
        const int peer = nth_source(row, k);
        if (sends(peer)) transfers_.receive(flat_view(received_, peer * packed_.bytes(), packed_.bytes()), peer, together_);
      }
    }
    for (const auto i : packed_.alone()) {
      for (int k = 1; k < row.size(); ++k) {
        const int peer = nth_source(row, k);
        if (sends(peer)) transfers_.receive(place(i, peer), peer, tags::data(call_, i));
      }
    }
  }
  void forget() noexcept override { transfers_.forget(); }
  virtual bool sends(int rank) const { return true; }

  Transfers transfers_;
  const PackedParts packed_;
  const int together_;   // the tag of the packed messages
  at::Tensor received_;  // the packed messages of all ranks, in rank order, with a place for this one's
};

class PairwiseGather final : public PairwisePending {
 public:
  PairwiseGather(std::shared_ptr<Group> group, const Call& call, const Label& label, std::span<const GatherPart> parts)
      : PairwisePending(std::move(group), call, label, shard_bytes(parts)), parts_(parts.begin(), parts.end()) {}
  ~PairwiseGather() override { settle(); }

 protected:
  void post() override {
    const Row& row = group_->row;
    receive([&](std::size_t i, int peer) {
      const std::int64_t numel = parts_[i].shard.numel();
      return flat_view(parts_[i].full, peer * numel, numel);
    });
    if (packed_.bytes() > 0) {
      const auto mine = flat_view(received_, row.rank * packed_.bytes(), packed_.bytes());
      for (const auto& [i, offset, bytes] : packed_.together()) {
        std::memcpy(region_of(mine, 0, 0) + offset, parts_[i].shard.const_data_ptr(), static_cast<std::size_t>(bytes));
      }
      for (int k = 1; k < row.size(); ++k) transfers_.send(mine, nth_target(row, k), together_);
    }
    for (const auto i : packed_.alone()) {
      const auto shard = flat_view(parts_[i].shard, 0, parts_[i].shard.numel());
      for (int k = 1; k < row.size(); ++k) transfers_.send(shard, nth_target(row, k), tags::data(call_, i));
    }
    for (const GatherPart& part : parts_) copy_own_shard(part, row.rank);  // While the messages travel.
  }
  void finish() override {
    const Row& row = group_->row;
    transfers_.wait_receives();
    arrived();
    for (const auto& [i, offset, bytes] : packed_.together()) {
      for (int peer = 0; peer < row.size(); ++peer) {
        if (peer == row.rank) continue;
        std::memcpy(region_of(parts_[i].full, peer, bytes), region_of(received_, peer, packed_.bytes()) + offset,
                    static_cast<std::size_t>(bytes));
      }
    }
    transfers_.wait_sends();
  }

 private:
  static std::vector<std::int64_t> shard_bytes(std::span<const GatherPart> parts) {
    std::vector<std::int64_t> bytes;
    for (const auto& part : parts) bytes.push_back(static_cast<std::int64_t>(part.shard.nbytes()));
    return bytes;
  }

  const std::vector<GatherPart> parts_;
};

class PairwiseReduce final : public PairwisePending {
 public:
  PairwiseReduce(std::shared_ptr<Group> group, const Call& call, const Label& label, std::span<const ReducePart> parts, double scale)
      : PairwisePending(std::move(group), call, label, contribution_sizes(parts)),
        parts_(parts.begin(), parts.end()),
        sources_(static_cast<std::size_t>(group_->row.size())),
        scale_(scale) {}
  ~PairwiseReduce() override { settle(); }

 protected:
  void post() override {
    const Row& row = group_->row;
    receive([&](std::size_t i, int peer) {
      const std::int64_t numel = parts_[i].encoding ? contribution_bytes(parts_[i]) : parts_[i].out.numel();
      return flat_view(parts_[i].staging, staging_slot(peer) * numel, numel);
    });
    if (!sends(row.rank)) return;
    if (packed_.bytes() > 0) {
      sent_ = bytes_for(packed_, row.size());
      for (int k = 1; k < row.size(); ++k) {
        const int peer = nth_target(row, k);
        const auto theirs = flat_view(sent_, peer * packed_.bytes(), packed_.bytes());
        for (const auto& [i, offset, bytes] : packed_.together()) {
          char* const place = region_of(theirs, 0, 0) + offset;
          if (parts_[i].encoding) {
            encode(parts_[i], peer, place);
          } else {
            std::memcpy(place, region_of(parts_[i].unreduced, peer, bytes), static_cast<std::size_t>(bytes));
          }
        }
        transfers_.send(theirs, peer, together_);
      }
    }
    for (const auto i : packed_.alone()) {
      const std::int64_t numel = parts_[i].out.numel();
      for (int k = 1; k < row.size(); ++k) {
        const int peer = nth_target(row, k);
        if (parts_[i].encoding) {
          const std::int64_t bytes = contribution_bytes(parts_[i]);
          const auto encoded = flat_view(parts_[i].staging, (row.size() - 1 + staging_slot(peer)) * bytes, bytes);
          encode(parts_[i], peer, encoded.mutable_data_ptr());
          transfers_.send(encoded, peer, tags::data(call_, i));
        } else {
          transfers_.send(flat_view(parts_[i].unreduced, peer * numel, numel), peer, tags::data(call_, i));
        }
      }
    }
  }

  // Sums each part as soon as it has arrived, while later parts are still being sent.
  void finish() override {
    std::size_t peers = 0;
    for (int rank = 0; rank < group_->row.size(); ++rank) peers += rank != group_->row.rank && sends(rank) ? 1 : 0;
    std::size_t receives = 0;
    if (packed_.bytes() > 0) {
      transfers_.wait_receives(receives += peers);
      if (packed_.alone().empty()) arrived();
      for (const auto& [i, offset, bytes] : packed_.together()) {
        sum(parts_[i], [&, offset = offset](int peer) { return region_of(received_, peer, packed_.bytes()) + offset; });
      }
    }
    for (const auto i : packed_.alone()) {
      transfers_.wait_receives(receives += peers);
      if (i == packed_.alone().back()) arrived();
      const auto bytes = contribution_bytes(parts_[i]);
      sum(parts_[i], [&](int peer) { return region_of(parts_[i].staging, staging_slot(peer), bytes); });
    }
    transfers_.wait_sends();
  }
  bool sends(int rank) const override { return gives(parts_, rank); }

 private:
  // Staging holds the peers' parts in rank order, without a hole for this rank's. What is encoded for them comes behind these.
  int staging_slot(int peer) const { return peer < group_->row.rank ? peer : peer - 1; }

  static std::vector<std::int64_t> contribution_sizes(std::span<const ReducePart> parts) {
    std::vector<std::int64_t> bytes;
    for (const auto& part : parts) bytes.push_back(contribution_bytes(part));
    return bytes;
  }

  /// The elements of this rank's gradients that are summed on `rank`.
  static const void* gradients_for(const ReducePart& part, int rank) {
    return region_of(part.unreduced, rank, part.out.numel() * static_cast<std::int64_t>(part.unreduced.itemsize()));
  }

  void encode(const ReducePart& part, int peer, void* to) const {
    const void* const gradients = gradients_for(part, peer);
    encode_contribution(part, {&gradients, 1}, group_->row.rank, peer, to);
  }

  template <typename FromPeer>
  void sum(const ReducePart& part, const FromPeer& from_peer) {
    const int own = group_->row.rank;
    std::vector<Contribution> contributions;
    for (int rank = 0; rank < group_->row.size(); ++rank) {
      const void* source = nullptr;  // zeros
      if (sends(rank)) source = rank == own ? gradients_for(part, own) : from_peer(rank);
      sources_[static_cast<std::size_t>(rank)] = source;
      if (part.encoding) contributions.push_back({.data = source, .is_encoded = rank != own});
    }
    if (part.encoding) return sum_contributions(part, contributions, part.unreduced.scalar_type(), sum_end(part, scale_));
    rank_order_sum(sources_, part.unreduced.scalar_type(), part.out.mutable_data_ptr(), part.out.scalar_type(), part.out.numel(),
                   sum_end(part, scale_));
  }

  const std::vector<ReducePart> parts_;
  at::Tensor sent_;  // the packed messages for all ranks, in rank order
  std::vector<const void*> sources_;
  const double scale_;
};

/// Small parts are sent in one message, as those of gathers are. Parts and messages without bytes are not sent. A rank that gathers ahead
/// of a consumer returns only when the consumer has finished with the previous bucket. Therefore a thread sends, waits, and copies all
/// bytes to their places.
class PairwiseUneven final : public GroupPending {
 public:
  PairwiseUneven(std::shared_ptr<Group> group, const Call& call, const Label& label, std::span<const UnevenPart> parts,
                 const std::vector<bool>& receives, std::shared_ptr<MessageThread> thread)
      : GroupPending(std::move(group), call, label),
        thread_(std::move(thread)),
        transfers_(*group_),
        parts_(parts.begin(), parts.end()),
        receives_(receives) {
    std::vector<std::int64_t> sizes;
    for (const UnevenPart& part : parts_) sizes.push_back(std::accumulate(part.bytes.begin(), part.bytes.end(), std::int64_t{0}));
    const PackedParts packed(sizes, 1);
    for (const auto& entry : packed.together()) together_.push_back(entry.part);
    alone_ = packed.alone();
  }
  ~PairwiseUneven() override { settle(); }

 protected:
  void post() override {
    const Row& row = group_->row;
    const bool receives = receives_[static_cast<std::size_t>(row.rank)];
    for (int k = 1; receives && k < row.size(); ++k) {
      const int peer = nth_source(row, k);
      const auto& message = received_.emplace_back(at::empty({packed_bytes(peer)}, at::kByte));
      if (message.numel() > 0) transfers_.receive(message, peer, tags::data(call_, parts_.size()));
      for (const auto i : alone_) {
        const at::Tensor region = region_of_rank(parts_[i], peer);
        if (region.numel() > 0) transfers_.receive(region, peer, tags::data(call_, i));
      }
    }
    sent_ = at::empty({packed_bytes(row.rank)}, at::kByte);
    thread_->add(this, [this] {
      try {
        bring();
      } catch (...) {
        failure_ = std::current_exception();
      }
    });
  }
  void finish() override {
    thread_->wait_for(this);
    if (failure_ != nullptr) std::rethrow_exception(failure_);
  }
  void forget() noexcept override {
    thread_->remove(this);
    transfers_.forget();
  }

 private:
  /// On the thread.
  void bring() {
    const Row& row = group_->row;
    auto* to = static_cast<char*>(sent_.mutable_data_ptr());
    for (const auto i : together_) {
      const auto bytes = parts_[i].own.nbytes();
      if (bytes > 0) std::memcpy(to, parts_[i].own.const_data_ptr(), bytes);
      to += bytes;
    }
    for (int k = 1; k < row.size(); ++k) {
      const int peer = nth_target(row, k);
      if (!receives_[static_cast<std::size_t>(peer)]) continue;
      if (sent_.numel() > 0) transfers_.send(sent_, peer, tags::data(call_, parts_.size()));
      for (const auto i : alone_) {
        const auto bytes = parts_[i].own.numel();
        if (bytes > 0) transfers_.send(flat_view(parts_[i].own, 0, bytes), peer, tags::data(call_, i));
      }
    }
    for (const UnevenPart& part : parts_) copy_own_bytes(part, row.rank);  // While the messages travel.
    transfers_.wait_receives();
    arrived();
    for (std::size_t k = 0; k < received_.size(); ++k) {
      const int peer = nth_source(row, static_cast<int>(k) + 1);
      const auto* from = static_cast<const char*>(received_[k].const_data_ptr());
      for (const auto i : together_) {
        const at::Tensor region = region_of_rank(parts_[i], peer);
        if (region.numel() > 0) std::memcpy(region.mutable_data_ptr(), from, region.nbytes());
        from += region.nbytes();
      }
    }
    transfers_.wait_sends();
  }

  /// The size of the message in which a rank sends its small parts.
  std::int64_t packed_bytes(int rank) const {
    std::int64_t bytes = 0;
    for (const auto i : together_) bytes += parts_[i].bytes[static_cast<std::size_t>(rank)];
    return bytes;
  }

  const std::shared_ptr<MessageThread> thread_;
  std::exception_ptr failure_;  // Of the thread, before it is waited for.
  Transfers transfers_;
  const std::vector<UnevenPart> parts_;
  const std::vector<bool> receives_;
  std::vector<std::size_t> together_;
  std::vector<std::size_t> alone_;
  std::vector<at::Tensor> received_;  // the messages with small parts, by nth_source
  at::Tensor sent_;
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

std::unique_ptr<GroupPending> PairwiseCommunicator::make_uneven(const Call& call, const Label& label, std::span<const UnevenPart> parts,
                                                                const std::vector<bool>& receives) {
  if (gather_thread_ == nullptr) gather_thread_ = std::make_shared<MessageThread>();
  return std::make_unique<PairwiseUneven>(group(), call, label, parts, receives, gather_thread_);
}

std::unique_ptr<GroupPending> PairwiseCommunicator::make_scatter(const Call& call, const Label& label, std::span<const ScatterPart> parts,
                                                                 int root) {
  return std::make_unique<PairwiseScatter>(group(), call, label, parts, root);
}

}  // namespace fsdp::comm
