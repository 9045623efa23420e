#include "comm/shared_communicator.h"

#include <cstring>
#include <optional>
#include <span>
#include <vector>

#include "comm/parts.h"
#include "comm/rank_order_sum.h"
#include "comm/served.h"
#include "comm/shared_row.h"

namespace fsdp::comm {
namespace {

/// A stretch of this rank's memory that peers read.
struct Stretch {
  const void* data;
  std::int64_t bytes;
};

/// What gathers and reductions in shared memory have in common. A subclass is final and calls end() in its destructor.
class SharedPending : public GroupPending, public Served {
 public:
  SharedPending(std::shared_ptr<Group> group, const Call& call, const Label& label)
      : GroupPending(std::move(group), call, label), shared_(*group_->shared) {}

  void advance() final {
    if (state_ == State::kReading && read_all()) {
      shared_.set_done(call_.number);
      state_ = State::kRead;
    }
    if (state_ == State::kRead && shared_.all_done(call_.number)) state_ = State::kDone;
  }

 protected:
  /// Says where this rank's stretches lie. Those outside of its shared heap are copied there.
  void offer(std::span<const Stretch> stretches) {
    Neighbourhood& neighbourhood = shared_.neighbourhood();
    const auto& heap = neighbourhood.heap();
    const std::int64_t table_bytes = aligned(static_cast<std::int64_t>(stretches.size_bytes()));
    std::vector<std::optional<std::int64_t>> offsets;
    std::int64_t bytes = table_bytes;
    for (const Stretch& stretch : stretches) {
      offsets.push_back(heap.offset_of(stretch.data));
      if (!offsets.back()) bytes += aligned(stretch.bytes);
    }
    block_ = neighbourhood.borrow(bytes);
    auto* const block = static_cast<char*>(block_.memory.get());
    const std::int64_t begin = *heap.offset_of(block);
    std::int64_t end = table_bytes;
    for (std::size_t i = 0; i < stretches.size(); ++i) {
      reinterpret_cast<std::int64_t*>(block)[i] = offsets[i].value_or(begin + end);
      if (offsets[i] || stretches[i].bytes == 0) continue;
      std::memcpy(block + end, stretches[i].data, static_cast<std::size_t>(stretches[i].bytes));
      end += aligned(stretches[i].bytes);
    }
    shared_.publish_parts(begin);
    start_service();
  }

  /// Reads what is there. True if that was all; then it is not called again.
  virtual bool read_all() = 0;

  /// Where a peer's stretches lie; null if that is not known yet, or is none of this rank's business.
  const std::int64_t* parts_of(int peer) {
    const Call* const theirs = shared_.call_of(peer, call_.number);
    if (theirs == nullptr || shared_.is_revoked(peer)) return nullptr;
    if (*theirs == call_) return shared_.parts_of(peer, call_.number);
    difference_ = describe_divergence(call_, row().rank, *theirs, peer);
    state_ = State::kLost;
    return nullptr;
  }

  /// After reading from a peer: what was read is what the peer had published.
  bool is_sound(int peer) {
    if (!shared_.is_revoked(peer)) return true;
    state_ = State::kLost;  // The peer's alarm will say why.
    return false;
  }

  void finish() final {
    group_->serve_until(call_.number, [this] { return state_ == State::kDone || !difference_.empty(); });
    if (!difference_.empty()) throw RowFailure(difference_);
    leave();
  }
  void forget() noexcept final { leave(); }

  void end() noexcept {
    settle();
    leave();
  }

  const Row& row() const { return group_->row; }

  SharedRow& shared_;

 private:
  enum class State { kReading, kRead, kDone, kLost };  // kReading -> kRead -> kDone; kReading -> kLost

  static std::int64_t aligned(std::int64_t bytes) { return (bytes + 63) / 64 * 64; }

  void leave() noexcept {
    end_service();
    shared_.neighbourhood().give_back(std::exchange(block_, {}));
  }

  State state_ = State::kReading;  // This, the next, and what read_all() writes: under the lock of all that is served.
  std::string difference_;         // between the ranks' calls
  Neighbourhood::Block block_;     // the offsets, and the copies behind them
};

class SharedGather final : public SharedPending {
 public:
  SharedGather(std::shared_ptr<Group> group, const Call& call, const Label& label, std::span<const GatherPart> parts)
      : SharedPending(std::move(group), call, label),
        parts_(parts.begin(), parts.end()),
        read_(static_cast<std::size_t>(row().size()), false) {}
  ~SharedGather() override { end(); }

 protected:
  void post() override {
    std::vector<Stretch> stretches;
    for (const GatherPart& part : parts_) {
      copy_own_shard(part, row().rank);
      const auto bytes = static_cast<std::int64_t>(part.shard.nbytes());
      const void* const own = static_cast<const char*>(part.full.const_data_ptr()) + row().rank * bytes;
      const bool is_shared = shared_.neighbourhood().heap().offset_of(own).has_value();
      stretches.push_back({.data = is_shared ? own : part.shard.const_data_ptr(), .bytes = bytes});
    }
    offer(stretches);
  }

  bool read_all() override {
    bool all = true;
    for (int k = 1; k < row().size(); ++k) {
      const int peer = (row().rank + k) % row().size();  // no rank is everybody's first
      if (!read_[static_cast<std::size_t>(peer)]) all = read(peer) && all;
    }
    return all;
  }

 private:
  bool read(int peer) {
    const std::int64_t* const offsets = parts_of(peer);
    if (offsets == nullptr) return false;
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      const std::size_t bytes = parts_[i].shard.nbytes();
      if (bytes == 0) continue;
      char* const full = static_cast<char*>(parts_[i].full.mutable_data_ptr());
      const char* const theirs = shared_.part_of(peer, offsets, i, static_cast<std::int64_t>(bytes));
      std::memcpy(full + static_cast<std::size_t>(peer) * bytes, theirs, bytes);
    }
    read_[static_cast<std::size_t>(peer)] = is_sound(peer);
    return read_[static_cast<std::size_t>(peer)];
  }

  const std::vector<GatherPart> parts_;
  std::vector<bool> read_;
};

class SharedReduce final : public SharedPending {
 public:
  SharedReduce(std::shared_ptr<Group> group, const Call& call, const Label& label, std::span<const ReducePart> parts, double scale)
      : SharedPending(std::move(group), call, label),
        parts_(parts.begin(), parts.end()),
        offsets_(static_cast<std::size_t>(row().size())),
        sources_(static_cast<std::size_t>(row().size())),
        scale_(scale) {}
  ~SharedReduce() override { end(); }

 protected:
  void post() override {
    std::vector<Stretch> stretches;
    for (const ReducePart& part : parts_) {
      stretches.push_back({.data = part.unreduced.const_data_ptr(), .bytes = static_cast<std::int64_t>(part.unreduced.nbytes())});
    }
    offer(stretches);
  }

  bool read_all() override {
    for (int peer = 0; peer < row().size(); ++peer) {
      auto& offsets = offsets_[static_cast<std::size_t>(peer)];
      if (peer != row().rank && offsets == nullptr) offsets = parts_of(peer);
      if (peer != row().rank && offsets == nullptr) return false;
    }
    for (std::size_t i = 0; i < parts_.size(); ++i) sum(i);
    for (int peer = 0; peer < row().size(); ++peer) {
      if (peer != row().rank && !is_sound(peer)) return false;
    }
    return true;
  }

 private:
  void sum(std::size_t i) {
    const ReducePart& part = parts_[i];
    const std::int64_t numel = part.out.numel();
    if (numel == 0) return;
    const auto bytes = static_cast<std::int64_t>(part.unreduced.nbytes());
    const std::int64_t begin = bytes / row().size() * row().rank;
    for (int rank = 0; rank < row().size(); ++rank) {
      const auto r = static_cast<std::size_t>(rank);
      sources_[r] = rank == row().rank ? static_cast<const char*>(part.unreduced.const_data_ptr()) + begin
                                       : shared_.part_of(rank, offsets_[r], i, bytes) + begin;
    }
    rank_order_sum(sources_, part.unreduced.scalar_type(), part.out.mutable_data_ptr(), part.out.scalar_type(), numel, scale_,
                   part.accumulate);
  }

  const std::vector<ReducePart> parts_;
  std::vector<const std::int64_t*> offsets_;  // of each peer's parts
  std::vector<const void*> sources_;
  const double scale_;
};

}  // namespace

std::unique_ptr<GroupPending> SharedCommunicator::make_gather(const Call& call, const Label& label, std::span<const GatherPart> parts) {
  return std::make_unique<SharedGather>(group(), call, label, parts);
}

std::unique_ptr<GroupPending> SharedCommunicator::make_reduce(const Call& call, const Label& label, std::span<const ReducePart> parts,
                                                              double scale) {
  return std::make_unique<SharedReduce>(group(), call, label, parts, scale);
}

}  // namespace fsdp::comm
