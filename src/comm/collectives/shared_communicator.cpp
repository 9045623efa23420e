#include "comm/collectives/shared_communicator.h"

#include <algorithm>
#include <exception>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/parallel_copy.h"
#include "comm/collectives/transfers.h"
#include "comm/host_memory/progress.h"
#include "comm/host_memory/shared_row.h"
#include "comm/parts.h"
#include "comm/rank_order_sum.h"
#include "comm/rounded_sum.h"

namespace fsdp::comm {
namespace {

/// A range of this rank's memory that peers read.
struct ByteRange {
  const void* data;
  std::int64_t bytes;
};

/// The common base of gathers and reductions in shared memory. A subclass is final and calls end() in its destructor.
class SharedPending : public GroupPending, public AdvancingCollective {
 public:
  SharedPending(std::shared_ptr<Group> group, const Call& call, const Label& label, std::shared_ptr<MessageThread> message_thread)
      : GroupPending(std::move(group), call, label),
        shared_(*group_->shared),
        transfers_(*group_),
        has_arrived_(hosts() == 1),
        message_thread_(std::move(message_thread)) {}

  void advance() final {
    try {
      if (state_ == State::kReading && read_all()) {
        shared_.set_done(call_.number);
        state_ = State::kRead;
      }
    } catch (...) {
      lose(std::current_exception());
    }
    if (state_ == State::kRead && has_arrived_ && shared_.all_done(call_.number)) state_ = State::kDone;
  }

 protected:
  /// Call it after the receives from other hosts have been posted.
  void begin_waiting() {
    begin_advancing();
    if (hosts() > 1) message_thread_->add(this, [this] { await_messages(); });
  }

  /// Publishes where this rank's ranges lie. Ranges outside of its shared heap are copied there first.
  void offer(std::span<const ByteRange> ranges) {
    HostMemory& host_memory = shared_.host_memory();
    const auto& heap = host_memory.heap();
    const std::int64_t table_bytes = aligned(static_cast<std::int64_t>(ranges.size_bytes()));
    std::vector<std::optional<std::int64_t>> offsets;
    std::int64_t bytes = table_bytes;
    for (const ByteRange& range : ranges) {
      offsets.push_back(heap.offset_of(range.data));
      if (!offsets.back()) bytes += aligned(range.bytes);
    }
    block_ = host_memory.borrow(bytes);
    auto* const block = static_cast<char*>(block_.memory.get());
    const std::int64_t begin = *heap.offset_of(block);
    std::int64_t end = table_bytes;
    for (std::size_t i = 0; i < ranges.size(); ++i) {
      reinterpret_cast<std::int64_t*>(block)[i] = offsets[i].value_or(begin + end);
      if (offsets[i] || ranges[i].bytes == 0) continue;
      parallel_copy(block + end, ranges[i].data, ranges[i].bytes);
      end += aligned(ranges[i].bytes);
    }
    shared_.publish_parts(call_.number, begin);
  }

  /// Reads the data that are available. Returns true once it has read all; it is not called again then.
  virtual bool read_all() = 0;
  /// Does the rest, once the peers need nothing more of this rank. Called by the thread that waits.
  virtual void conclude() {}

  /// Returns where a neighbour's ranges lie; null if that is not known yet, or if this rank does not read them.
  const std::int64_t* parts_of(int neighbour) {
    const Call* const theirs = shared_.call_of(neighbour, call_.number);
    if (theirs == nullptr || shared_.is_revoked(neighbour)) return nullptr;
    if (*theirs == call_) return shared_.parts_of(neighbour, call_.number);
    lose(std::make_exception_ptr(
        RowFailure(describe_divergence(call_, row().global_rank(row().rank), *theirs, row().global_rank(shared_.first() + neighbour)))));
    return nullptr;
  }

  /// Call it after reading from a neighbour. Returns true if the data that were read are those that the neighbour had published.
  bool is_sound(int neighbour) {
    if (!shared_.is_revoked(neighbour)) return true;
    state_ = State::kLost;  // Its alarm will contain the reason.
    return false;
  }

  void finish() final {
    try {
      group_->advance_until(call_.number, [this] { return state_ == State::kDone || failure_ != nullptr; });
    } catch (...) {
      // If the message thread has waited too long, Gloo has closed all connections: that is why.
      if (message_thread_ != nullptr) message_thread_->remove(this);
      if (failure_ == nullptr) throw;
    }
    if (failure_ != nullptr) std::rethrow_exception(failure_);
    conclude();
    transfers_.wait_sends();
    leave();
  }
  void forget() noexcept final {
    leave();
    transfers_.forget();
  }

  void end() noexcept {
    settle();
    leave();
  }

  const Row& row() const { return group_->row; }
  int hosts() const { return row().size() / shared_.size(); }
  int own_host() const { return row().rank / shared_.size(); }
  /// Returns the rank that has this rank's place on another host.
  int equal_on(int host) const { return host * shared_.size() + shared_.rank(); }
  /// The k-th host to which this one sends, from 1, and the host that sends to this one as its k-th. No host is the first target of all
  /// others.
  int nth_target(int k) const { return (own_host() + hosts() - k) % hosts(); }
  int nth_source(int k) const { return (own_host() + k) % hosts(); }

  SharedRow& shared_;
  Transfers transfers_;  // with other hosts; the message thread waits for what is received
  bool has_arrived_;     // whether the other hosts' data have arrived; protected by the lock that all advancing collectives share

 private:
  enum class State { kReading, kRead, kDone, kLost };  // kReading -> kRead -> kDone; kReading or kRead -> kLost

  static std::int64_t aligned(std::int64_t bytes) { return (bytes + 63) / 64 * 64; }

  void lose(std::exception_ptr failure) {
    if (failure_ == nullptr) failure_ = std::move(failure);
    state_ = State::kLost;
  }

  void await_messages() {
    std::exception_ptr failure;
    try {
      transfers_.wait_receives();
    } catch (...) {
      failure = std::current_exception();
    }
    change([&] {
      has_arrived_ = failure == nullptr;
      if (failure != nullptr) lose(failure);
    });
    advance_all_and_wake(shared_.host_memory());
  }

  void leave() noexcept {
    if (message_thread_ != nullptr) message_thread_->remove(this);
    end_advancing();
    shared_.host_memory().give_back(std::exchange(block_, {}));
  }

  const std::shared_ptr<MessageThread> message_thread_;  // null on one host
  State state_ = State::kReading;                        // state_, failure_ and what read_all() writes are protected by that lock.
  std::exception_ptr failure_;                           // Empty if a peer's alarm will contain the reason.
  HostMemory::Block block_;                              // the offsets, and the copies behind them
};

class SharedGather final : public SharedPending {
 public:
  SharedGather(std::shared_ptr<Group> group, const Call& call, const Label& label, std::span<const GatherPart> parts,
               std::shared_ptr<MessageThread> message_thread)
      : SharedPending(std::move(group), call, label, std::move(message_thread)),
        parts_(parts.begin(), parts.end()),
        read_(static_cast<std::size_t>(shared_.size()), false) {}
  ~SharedGather() override { end(); }

 protected:
  void post() override {
    shared_.announce_parts();
    for (int k = 1; k < hosts(); ++k) {
      const int peer = equal_on(nth_source(k));
      for (std::size_t i = 0; i < parts_.size(); ++i) {
        const std::int64_t numel = parts_[i].shard.numel();
        if (numel > 0) transfers_.receive(flat_view(parts_[i].full, peer * numel, numel), peer, tags::data(call_, i));
      }
    }
    for (int k = 1; k < hosts(); ++k) {
      for (std::size_t i = 0; i < parts_.size(); ++i) {
        const std::int64_t numel = parts_[i].shard.numel();
        if (numel > 0) transfers_.send(flat_view(parts_[i].shard, 0, numel), equal_on(nth_target(k)), tags::data(call_, i));
      }
    }
    for (const GatherPart& part : parts_) copy_own_shard(part, row().rank);
    if (hosts() == 1) offer_shards();
    begin_waiting();
  }

  bool read_all() override {
    if (!has_arrived_) return false;
    if (!offered_) offer_shards();
    bool all = true;
    for (int k = 1; k < shared_.size(); ++k) {
      const int neighbour = (shared_.rank() + k) % shared_.size();  // no rank is everybody's first
      if (!read_[static_cast<std::size_t>(neighbour)]) all = read(neighbour) && all;
    }
    return all;
  }

 private:
  /// Publishes, for each part, this rank's shard and those of the ranks of equal place, by host.
  void offer_shards() {
    std::vector<ByteRange> ranges;
    for (const GatherPart& part : parts_) {
      const auto bytes = static_cast<std::int64_t>(part.shard.nbytes());
      const auto* const full = static_cast<const char*>(part.full.const_data_ptr());
      const bool is_shared = shared_.host_memory().heap().offset_of(full).has_value();
      for (int host = 0; host < hosts(); ++host) {
        const bool own = host == own_host() && !is_shared;
        ranges.push_back({.data = own ? part.shard.const_data_ptr() : full + equal_on(host) * bytes, .bytes = bytes});
      }
    }
    offer(ranges);
    offered_ = true;
  }

  bool read(int neighbour) {
    const std::int64_t* const offsets = parts_of(neighbour);
    if (offsets == nullptr) return false;
    std::size_t range = 0;
    for (const GatherPart& part : parts_) {
      const std::size_t bytes = part.shard.nbytes();
      char* const full = static_cast<char*>(part.full.mutable_data_ptr());
      for (int host = 0; host < hosts(); ++host, ++range) {
        if (bytes == 0) continue;
        const char* const theirs = shared_.part_of(neighbour, offsets, range, static_cast<std::int64_t>(bytes));
        parallel_copy(full + static_cast<std::size_t>(host * shared_.size() + neighbour) * bytes, theirs, static_cast<std::int64_t>(bytes));
      }
    }
    read_[static_cast<std::size_t>(neighbour)] = is_sound(neighbour);
    return read_[static_cast<std::size_t>(neighbour)];
  }

  const std::vector<GatherPart> parts_;
  std::vector<bool> read_;
  bool offered_ = false;
};

/// On one host: each rank that receives copies the peers' bytes from where they lie, as soon as they have arrived. A rank that gathers
/// ahead of a consumer waits only when the consumer has finished with the previous bucket. Therefore the thread that advances collectives
/// also copies this rank's own bytes to their place, where peers read them.
class SharedUneven final : public SharedPending {
 public:
  SharedUneven(std::shared_ptr<Group> group, const Call& call, const Label& label, std::span<const UnevenPart> parts,
               const std::vector<bool>& receives)
      : SharedPending(std::move(group), call, label, /*message_thread=*/nullptr),
        parts_(parts.begin(), parts.end()),
        read_(static_cast<std::size_t>(shared_.size()), !receives[static_cast<std::size_t>(row().rank)]) {}
  ~SharedUneven() override { end(); }

 protected:
  void post() override {
    shared_.announce_parts();
    begin_waiting();
    advance_all_beside(shared_.host_memory());
  }

  bool read_all() override {
    if (!offered_) offer_own();
    bool all = true;
    for (int k = 1; k < shared_.size(); ++k) {
      const int neighbour = (shared_.rank() + k) % shared_.size();  // no rank is everybody's first
      if (!read_[static_cast<std::size_t>(neighbour)]) all = read(neighbour) && all;
    }
    return all;
  }

 private:
  void offer_own() {
    std::vector<ByteRange> ranges;
    for (const UnevenPart& part : parts_) {
      const at::Tensor lies_in = part.whole.defined() ? region_of_rank(part, row().rank) : part.own;
      const auto bytes = static_cast<std::int64_t>(lies_in.nbytes());
      if (bytes > 0 && lies_in.const_data_ptr() != part.own.const_data_ptr()) {
        parallel_copy(lies_in.mutable_data_ptr(), part.own.const_data_ptr(), bytes);
      }
      ranges.push_back({.data = lies_in.const_data_ptr(), .bytes = bytes});
    }
    offer(ranges);
    offered_ = true;
    shared_.host_memory().ask_peers_to_advance();  // which may be computing, and have found nothing before
  }

  bool read(int neighbour) {
    const std::int64_t* const offsets = parts_of(neighbour);
    if (offsets == nullptr) return false;
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      const at::Tensor region = region_of_rank(parts_[i], neighbour);
      if (region.numel() == 0) continue;
      parallel_copy(static_cast<char*>(region.mutable_data_ptr()), shared_.part_of(neighbour, offsets, i, region.numel()), region.numel());
    }
    read_[static_cast<std::size_t>(neighbour)] = is_sound(neighbour);
    return read_[static_cast<std::size_t>(neighbour)];
  }

  const std::vector<UnevenPart> parts_;
  std::vector<bool> read_;  // by neighbour; true from the start if this rank does not receive
  bool offered_ = false;
};

class SharedReduce final : public SharedPending {
 public:
  SharedReduce(std::shared_ptr<Group> group, const Call& call, const Label& label, std::span<const ReducePart> parts, double scale,
               std::shared_ptr<MessageThread> message_thread)
      : SharedPending(std::move(group), call, label, std::move(message_thread)),
        parts_(parts.begin(), parts.end()),
        offsets_(static_cast<std::size_t>(shared_.size())),
        sources_(static_cast<std::size_t>(std::max(shared_.size(), hosts()))),
        scale_(scale) {}
  ~SharedReduce() override { end(); }

 protected:
  void post() override {
    shared_.announce_parts();
    for (int k = 1; k < hosts(); ++k) {
      const int host = nth_source(k);
      for (std::size_t i = 0; i < parts_.size(); ++i) {
        if (parts_[i].out.numel() > 0) transfers_.receive(received(parts_[i], host), equal_on(host), tags::data(call_, i));
      }
    }
    std::vector<ByteRange> ranges;
    const bool offers = gives(parts_, row().rank);
    for (const ReducePart& part : parts_) {
      ranges.push_back({.data = offers ? part.unreduced.const_data_ptr() : nullptr,
                        .bytes = offers ? static_cast<std::int64_t>(part.unreduced.nbytes()) : 0});
    }
    offer(ranges);
    begin_waiting();
  }

  bool read_all() override {
    for (int neighbour = 0; neighbour < shared_.size(); ++neighbour) {
      auto& offsets = offsets_[static_cast<std::size_t>(neighbour)];
      if (neighbour != shared_.rank() && offsets == nullptr) offsets = parts_of(neighbour);
      if (neighbour != shared_.rank() && offsets == nullptr) return false;
    }
    for (std::size_t i = 0; i < parts_.size(); ++i) sum_neighbours(i);
    for (int neighbour = 0; neighbour < shared_.size(); ++neighbour) {
      if (neighbour != shared_.rank() && !is_sound(neighbour)) return false;
    }
    for (int k = 1; k < hosts(); ++k) {
      const int host = nth_target(k);
      for (std::size_t i = 0; i < parts_.size(); ++i) {
        if (parts_[i].out.numel() > 0) transfers_.send(sent(parts_[i], host), equal_on(host), tags::data(call_, i));
      }
    }
    return true;
  }

  void conclude() override {
    if (hosts() == 1) return;
    for (const ReducePart& part : parts_) {
      if (part.encoding) {
        sum_encoded(part);
        continue;
      }
      for (int host = 0; host < hosts(); ++host) {
        sources_[static_cast<std::size_t>(host)] = (host == own_host() ? sent(part, host) : received(part, host)).const_data_ptr();
      }
      rank_order_sum(std::span(sources_).first(static_cast<std::size_t>(hosts())), sum_dtype(part.unreduced.scalar_type()),
                     part.out.mutable_data_ptr(), part.out.scalar_type(), part.out.numel(), sum_end(part, scale_));
    }
  }

 private:
  /// Returns the part of the staging memory for the sums that are sent to a host, and for those of this host itself. If they are encoded,
  /// this host's come first, in fp32.
  at::Tensor sent(const ReducePart& part, int host) const { return slot(part, part.encoding ? other(host) : host); }
  /// The same for the sums that are received from a host. They come after those that are sent.
  at::Tensor received(const ReducePart& part, int host) const { return slot(part, (part.encoding ? hosts() - 1 : hosts()) + other(host)); }
  /// The number of another host without this one.
  int other(int host) const { return host < own_host() ? host : host - 1; }

  static at::Tensor slot(const ReducePart& part, int number) {
    if (part.encoding) {
      const std::int64_t bytes = contribution_bytes(part);
      return flat_view(part.staging, part.out.numel() * static_cast<std::int64_t>(sizeof(float)) + number * bytes, bytes);
    }
    const auto wire_dtype = part.unreduced.scalar_type();
    const auto numel = part.out.numel() * static_cast<std::int64_t>(elementSize(sum_dtype(wire_dtype)) / elementSize(wire_dtype));
    return flat_view(part.staging, number * numel, numel);
  }

  void sum_encoded(const ReducePart& part) const {
    std::vector<Contribution> contributions;
    for (int host = 0; host < hosts(); ++host) {
      const bool is_own = host == own_host();
      contributions.push_back(
          {.data = is_own ? part.staging.const_data_ptr() : received(part, host).const_data_ptr(), .is_encoded = !is_own});
    }
    sum_contributions(part, contributions, at::kFloat, sum_end(part, scale_));
  }

  /// Sums the neighbours' gradients of part i. On one host this gives the result; with several hosts, it gives one sum for each rank of
  /// equal place.
  void sum_neighbours(std::size_t i) {
    const ReducePart& part = parts_[i];
    const std::int64_t numel = part.out.numel();
    if (numel == 0) return;
    const auto dtype = part.unreduced.scalar_type();
    const auto bytes = static_cast<std::int64_t>(part.unreduced.nbytes());
    const auto neighbours = std::span(sources_).first(static_cast<std::size_t>(shared_.size()));
    for (int host = 0; host < hosts(); ++host) {
      const std::int64_t begin = bytes / row().size() * equal_on(host);
      for (int neighbour = 0; neighbour < shared_.size(); ++neighbour) {
        const auto n = static_cast<std::size_t>(neighbour);
        neighbours[n] = nullptr;  // zeros
        if (!gives(parts_, shared_.first() + neighbour)) continue;
        neighbours[n] = neighbour == shared_.rank() ? static_cast<const char*>(part.unreduced.const_data_ptr()) + begin
                                                    : shared_.part_of(neighbour, offsets_[n], i, bytes) + begin;
      }
      if (hosts() == 1) {
        rank_order_sum(neighbours, dtype, part.out.mutable_data_ptr(), part.out.scalar_type(), numel, sum_end(part, scale_));
      } else if (!part.encoding) {
        rank_order_sum(neighbours, dtype, sent(part, host).mutable_data_ptr(), sum_dtype(dtype), numel, {});
      } else if (host == own_host()) {
        rank_order_sum(neighbours, dtype, part.staging.mutable_data_ptr(), at::kFloat, numel, {});
      } else {
        encode_contribution(part, neighbours, own_host(), host, sent(part, host).mutable_data_ptr());
      }
    }
  }

  const std::vector<ReducePart> parts_;
  std::vector<const std::int64_t*> offsets_;  // where each neighbour's parts lie
  std::vector<const void*> sources_;
  const double scale_;
};

}  // namespace

SharedCommunicator::SharedCommunicator(Row row, const c10::intrusive_ptr<c10d::Backend>& gloo, std::shared_ptr<SharedRow> shared)
    : PairwiseCommunicator(std::move(row), gloo, std::move(shared)),
      traffic_(Traffic::by_shared_memory(size(), group()->shared->size())),
      message_thread_(hosts() > 1 ? std::make_shared<MessageThread>() : nullptr) {}

std::unique_ptr<GroupPending> SharedCommunicator::make_gather(const Call& call, const Label& label, std::span<const GatherPart> parts) {
  return std::make_unique<SharedGather>(group(), call, label, parts, message_thread_);
}

std::unique_ptr<GroupPending> SharedCommunicator::make_uneven(const Call& call, const Label& label, std::span<const UnevenPart> parts,
                                                              const std::vector<bool>& receives) {
  // Between hosts each rank sends its bytes itself.
  if (hosts() > 1) return PairwiseCommunicator::make_uneven(call, label, parts, receives);
  return std::make_unique<SharedUneven>(group(), call, label, parts, receives);
}

std::unique_ptr<GroupPending> SharedCommunicator::make_reduce(const Call& call, const Label& label, std::span<const ReducePart> parts,
                                                              double scale) {
  return std::make_unique<SharedReduce>(group(), call, label, parts, scale, message_thread_);
}

}  // namespace fsdp::comm
