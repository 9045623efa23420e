#include "comm/collectives/native_communicator.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <bit>
#include <functional>
#include <iterator>
#include <optional>
#include <utility>
#include <vector>

#include "comm/collectives/coalesced_works.h"
#include "comm/collectives/symmetric_memory.h"
#include "comm/parts.h"
#include "comm/rank_order_sum.h"

namespace fsdp::comm {
namespace {

Group::Compares when_compared(const c10d::Backend* backend) {
  return backend != nullptr && is_like_nccl(*backend) ? Group::Compares::kLate : Group::Compares::kFirst;
}

class NativeGather final : public GroupPending {
 public:
  NativeGather(std::shared_ptr<Group> group, const Call& call, const Label& label, std::span<const GatherPart> parts)
      : GroupPending(std::move(group), call, label), parts_(parts.begin(), parts.end()) {}
  ~NativeGather() override { settle(); }

 protected:
  void post() override {
    if (group_->data == nullptr) {
      for (const GatherPart& part : parts_) copy_own_shard(part, 0);
      return;
    }
    find_peers();
    std::vector<at::Tensor> wholes, shards;
    for (const GatherPart& part : parts_) {
      if (part.shard.numel() == 0) continue;
      wholes.push_back(flat_view(part.full, 0, part.full.numel()));
      shards.push_back(flat_view(part.shard, 0, part.shard.numel()));
    }
    works_ = all_gather_together(*group_->data, std::move(wholes), std::move(shards));
  }
  void finish() override {
    if (works_.empty()) return;
    wait_on_stream(parts_.front().full.device(), [this] { wait_all(works_); });
  }
  void forget() noexcept override { works_.clear(); }

 private:
  void find_peers() {
    for (GatherPart& part : parts_) {
      if (!symmetric_memory::find_peers(part.full, group_->data->getGroupUid())) continue;
      copy_own_shard(part, group_->row.rank);  // What is sent has to lie there, too.
      part.shard = flat_view(part.full, group_->row.rank * part.shard.numel(), part.shard.numel());
    }
  }

  std::vector<GatherPart> parts_;
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

class NativeReduce final : public GroupPending {
 public:
  NativeReduce(std::shared_ptr<Group> group, const Call& call, const Label& label, std::span<const ReducePart> parts, double scale,
               std::shared_ptr<MessageSum> messages)
      : GroupPending(std::move(group), call, label), parts_(parts.begin(), parts.end()), scale_(scale), messages_(std::move(messages)) {
    // The backend's collectives take as much of every rank.
    for (ReducePart& part : parts_) {
      part.unreduced = unreduced_or_zeros(part, group_->row.rank);
      if (part.out.numel() > 0) (needs_sum_here(part) ? summed_here_ : summed_by_backend_).push_back(&part);
    }
  }
  ~NativeReduce() override { settle(); }

 protected:
  void post() override {
    if (group_->data == nullptr) return;
    works_ = start_sums_of_backend();
    if (!summed_here_.empty()) std::ranges::move(start_sums_here(), std::back_inserter(works_));
  }
  void finish() override {
    if (!works_.empty()) wait_on_stream(parts_.front().out.device(), [this] { wait_all(works_); });
    if (earlier_pieces_) earlier_pieces_->block(c10::impl::VirtualGuardImpl(device().type()).getStream(device()));
    std::vector<RankOrderSum> sums;
    for (const ReducePart* const part : summed_by_backend_) {
      const auto& source = group_->data == nullptr ? part->unreduced : received_by_backend(*part);
      sums.push_back({.sources = {source}, .out = part->out, .end = sum_end(*part, is_averaged(*part) ? 1.0 : scale_)});
    }
    rank_order_sums(sums);
    add_up(last_pieces_);
  }
  void forget() noexcept override {
    works_.clear();
    messages_->rejoin();
  }

 private:
  using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;

  at::Device device() const { return parts_.front().out.device(); }

  Works start_sums_of_backend() {
    std::vector<at::Tensor> outs, inputs;
    c10d::ReduceOp op = c10d::ReduceOp::SUM;
    for (const ReducePart* const part : summed_by_backend_) {
      if (is_averaged(*part)) op = c10d::ReduceOp::AVG;  // As all of them: they have the same ranks and scale.
      outs.push_back(received_by_backend(*part));
      inputs.push_back(flat_view(part->unreduced, 0, part->unreduced.numel()));
    }
    return reduce_scatter_together(*group_->data, std::move(outs), std::move(inputs), op);
  }

  /// Posts all messages. What has to be summed before the last of them is summed beside the computation. finish() adds up the last pieces.
  Works start_sums_here() {
    const std::int64_t count = messages_->count(summed_here_);
    std::optional<c10::StreamGuard> beside;
    if (messages_->levels().are_two() || count > 1) beside.emplace(messages_->stream_behind_current(device()));
    last_pieces_ = messages_->pieces(summed_here_, 0);
    Works arriving = send(last_pieces_);
    for (std::int64_t next = 1; next < count; ++next) {
      const auto pieces = std::exchange(last_pieces_, messages_->pieces(summed_here_, next));
      // The next pieces take the memory of those before these, which have been added up.
      Works arriving_next = send(last_pieces_);
      wait_all(sum_within_hosts(pieces, std::move(arriving)));
      add_up(pieces);
      arriving = std::move(arriving_next);
    }
    arriving = sum_within_hosts(last_pieces_, std::move(arriving));
    if (count > 1 && !device().is_cpu()) {
      earlier_pieces_.emplace(device().type());  // The computing stream waits for it, because the last messages may arrive earlier.
      earlier_pieces_->record(beside->current_stream());
    }
    return arriving;
  }

  /// Starts the first level that has messages.
  Works send(std::span<const MessageSum::Piece> pieces) {
    const SumLevels& levels = messages_->levels();
    return levels.are_two() && levels.ranks == 1 ? send_sums(pieces) : messages_->send_unreduced(pieces);
  }
  /// In two levels with messages, waits for the first one, and starts the second. Returns the works that add_up() needs.
  Works sum_within_hosts(std::span<const MessageSum::Piece> pieces, Works arriving) {
    if (!messages_->levels().are_two() || messages_->levels().ranks == 1) return arriving;
    wait_all(arriving);
    return send_sums(pieces);
  }
  Works send_sums(std::span<const MessageSum::Piece> pieces) {
    messages_->sum_neighbours(pieces, scale_);
    return messages_->send_sums(pieces);
  }
  void add_up(std::span<const MessageSum::Piece> pieces) {
    messages_->levels().are_two() ? messages_->sum_hosts(pieces, scale_) : messages_->sum_neighbours(pieces, scale_);
  }

  /// NCCL and its like divide as they add up, without a pass of their own. By a power of two the result is the same.
  bool is_averaged(const ReducePart& part) const {
    const int size = group_->row.size();
    return group_->data != nullptr && size > 1 && std::has_single_bit(static_cast<unsigned>(size)) && scale_ == 1.0 / size &&
           is_like_nccl(*group_->data);
  }

  /// The backend sums where the result is to be, if nothing has to be added to what is there.
  at::Tensor received_by_backend(const ReducePart& part) const {
    const bool in_place = !part.out.is_cpu() && !part.accumulate && part.out.scalar_type() == part.unreduced.scalar_type() &&
                          !overlaps(part.out, part.unreduced);
    return in_place ? flat_view(part.out, 0, part.out.numel()) : flat_view(part.staging, 0, part.out.numel());
  }

  bool needs_sum_here(const ReducePart& part) const {
    return group_->data != nullptr && (part.encoding || !backend_sums(part.unreduced.scalar_type()));
  }

  std::vector<ReducePart> parts_;
  std::vector<const ReducePart*> summed_here_;
  std::vector<const ReducePart*> summed_by_backend_;  // or, in a row without a backend, not sent
  const double scale_;
  const std::shared_ptr<MessageSum> messages_;
  Works works_;
  std::vector<MessageSum::Piece> last_pieces_;  // whose messages arrive last
  std::optional<c10::Event> earlier_pieces_;    // the sums of the pieces before them, where there are streams
};

/// Backends gather even shards only. What all ranks have as much of, and all receive, is such a gather; the rest travels as messages.
class NativeUneven final : public GroupPending {
 public:
  NativeUneven(std::shared_ptr<Group> group, const Call& call, const Label& label, std::span<const UnevenPart> parts,
               const std::vector<bool>& receives, std::function<void(c10::Device)> connect)
      : GroupPending(std::move(group), call, label),
        parts_(parts.begin(), parts.end()),
        receives_(receives),
        connect_(std::move(connect)) {}
  ~NativeUneven() override { settle(); }

 protected:
  void post() override {
    const Row& row = group_->row;
    for (const UnevenPart& part : parts_) copy_own_bytes(part, row.rank);
    if (row.size() == 1 || parts_.empty()) return;
    connect_(parts_.front().own.device());
    std::vector<at::Tensor> argument(1);
    CoalescedWorks works(*group_->data, /*several=*/true);
    for (const UnevenPart& part : parts_) {
      if (is_even(part)) {
        at::Tensor whole = flat_view(part.whole, 0, part.whole.numel());
        at::Tensor own = region_of_rank(part, row.rank);
        if (own.numel() > 0) works.add(group_->data->_allgather_base(whole, own));
        continue;
      }
      for (int peer = 0; peer < row.size(); ++peer) {
        if (peer == row.rank) continue;
        if (part.whole.defined() && part.bytes[static_cast<std::size_t>(peer)] > 0) {
          argument[0] = region_of_rank(part, peer);
          works.add(group_->data->recv(argument, peer, /*tag=*/0));
        }
        if (receives_[static_cast<std::size_t>(peer)] && part.own.numel() > 0) {
          argument[0] = flat_view(part.own, 0, part.own.numel());
          works.add(group_->data->send(argument, peer, /*tag=*/0));
        }
      }
    }
    works_ = works.end();
  }
  void finish() override { wait_all(works_); }
  void forget() noexcept override { works_.clear(); }

 private:
  bool is_even(const UnevenPart& part) const {
    const auto as_first = [&](std::int64_t bytes) { return bytes == part.bytes.front(); };
    return std::ranges::all_of(part.bytes, as_first) && std::ranges::all_of(receives_, std::identity());
  }

  const std::vector<UnevenPart> parts_;
  const std::vector<bool> receives_;
  const std::function<void(c10::Device)> connect_;
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

class NativeScatter final : public GroupPending {
 public:
  NativeScatter(std::shared_ptr<Group> group, const Call& call, const Label& label, std::span<const ScatterPart> parts, int root,
                std::function<void(c10::Device)> connect)
      : GroupPending(std::move(group), call, label), parts_(parts.begin(), parts.end()), root_(root), connect_(std::move(connect)) {}
  ~NativeScatter() override { settle(); }

 protected:
  void post() override {
    if (group_->row.size() == 1) {
      for (const ScatterPart& part : parts_) copy_root_shard(part, root_);
      return;
    }
    if (!parts_.empty()) connect_(parts_.front().into.device());
    // By messages, as the shards may differ in size; in bytes, as backends have messages of few dtypes. Each is a tensor of a list, as c10d
    // takes them. Single messages would have NCCL connect each pair of ranks for itself.
    std::vector<at::Tensor> argument(1);
    CoalescedWorks works(*group_->data, /*several=*/true);
    for (const ScatterPart& part : parts_) {
      if (group_->row.rank != root_) {
        if (part.into.numel() == 0) continue;
        argument[0] = flat_view(part.into, 0, part.into.numel()).view(at::kByte);
        works.add(group_->data->recv(argument, root_, /*tag=*/0));
        continue;
      }
      for (int peer = 0; peer < group_->row.size(); ++peer) {
        const at::Tensor& shard = part.shards[static_cast<std::size_t>(peer)];
        if (peer == root_ || shard.numel() == 0) continue;
        argument[0] = flat_view(shard, 0, shard.numel()).view(at::kByte);
        works.add(group_->data->send(argument, peer, /*tag=*/0));
      }
      copy_root_shard(part, root_);
    }
    works_ = works.end();
  }
  void finish() override { wait_all(works_); }
  void forget() noexcept override { works_.clear(); }

 private:
  const std::vector<ScatterPart> parts_;
  const int root_;
  const std::function<void(c10::Device)> connect_;
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

}  // namespace

NativeCommunicator::NativeCommunicator(Row row, c10::intrusive_ptr<c10d::Backend> backend, c10::intrusive_ptr<c10d::Backend> control,
                                       int ranks_per_host, Group::Ends ends, std::int64_t piece_staging)
    : GroupCommunicator(std::move(row), std::move(control), backend, /*shared=*/nullptr, ends, when_compared(backend.get())),
      messages_(std::make_shared<MessageSum>(group()->row, group()->data, SumLevels::of(size(), ranks_per_host, piece_staging))),
      rounded_messages_(
          std::make_shared<MessageSum>(group()->row, group()->data, SumLevels::of_rounded(size(), ranks_per_host, piece_staging))),
      traffic_(Traffic::by_backend(size(), ranks_per_host, piece_staging)) {}

bool NativeCommunicator::is_alone() const { return size() == 1 && group()->data == nullptr; }

std::int64_t NativeCommunicator::staging_numel(std::int64_t shard_numel, at::ScalarType wire_dtype) const {
  return group()->data == nullptr ? 0 : traffic_.staging_numel(shard_numel, wire_dtype);
}

MemorySource NativeCommunicator::use_memory(c10::Device device, BufferMemory memory) {
  const auto& backend = group()->data;
  if (backend == nullptr) return {};
  if (memory == BufferMemory::kGroup && backend->supportsTensorAlloc(device.index())) {
    connect(device);
    return [backend, device](std::int64_t bytes) {
      return memory_of(backend->allocateTensor(bytes, at::TensorOptions().dtype(at::kByte).device(device)));
    };
  }
  if (memory == BufferMemory::kSymmetric && symmetric_memory::exists(device)) {
    connect(device);
    return symmetric_memory::source(device);
  }
  return {};
}

/// NCCL's communicator is made by the first collective, in which all ranks must take part: it registers memory, and sends messages to some.
void NativeCommunicator::connect(c10::Device device) {
  if (is_connected_) return;
  c10d::BarrierOptions options;
  if (device.has_index()) options.device_ids = {device.index()};  // Else NCCL guesses one.
  group()->data->barrier(options)->wait();
  is_connected_ = true;
}

std::unique_ptr<GroupPending> NativeCommunicator::make_gather(const Call& call, const Label& label, std::span<const GatherPart> parts) {
  return std::make_unique<NativeGather>(group(), call, label, parts);
}

std::unique_ptr<GroupPending> NativeCommunicator::make_uneven(const Call& call, const Label& label, std::span<const UnevenPart> parts,
                                                              const std::vector<bool>& receives) {
  return std::make_unique<NativeUneven>(group(), call, label, parts, receives, [this](c10::Device device) { connect(device); });
}

std::unique_ptr<GroupPending> NativeCommunicator::make_reduce(const Call& call, const Label& label, std::span<const ReducePart> parts,
                                                              double scale) {
  const bool is_rounded = std::ranges::any_of(parts, [](const ReducePart& part) { return part.encoding.has_value(); });
  return std::make_unique<NativeReduce>(group(), call, label, parts, scale, is_rounded ? rounded_messages_ : messages_);
}

std::unique_ptr<GroupPending> NativeCommunicator::make_scatter(const Call& call, const Label& label, std::span<const ScatterPart> parts,
                                                               int root) {
  return std::make_unique<NativeScatter>(group(), call, label, parts, root, [this](c10::Device device) { connect(device); });
}

}  // namespace fsdp::comm
