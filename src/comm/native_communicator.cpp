#include "comm/native_communicator.h"

#include <vector>

#include "comm/pieces.h"
#include "comm/rank_order_sum.h"

namespace fsdp::comm {
namespace {

bool backend_sums(at::ScalarType dtype) { return dtype == at::kFloat || dtype == at::kDouble; }

std::int64_t staging_numel(std::int64_t shard_numel, at::ScalarType dtype, int size) {
  if (size == 1) return 0;
  return backend_sums(dtype) ? shard_numel : size * shard_numel;
}

// The c10d works of one collective of ours. Operations posted between the constructor and end() are launched together where the backend can
// (NCCL: one kernel for all pieces). Without end(), after an exception, the destructor ends what has been posted: the backend must not take
// the next collective's operations for more of this one's.
class Works {
 public:
  Works(c10d::Backend& backend, std::size_t operations) : backend_(backend), together_(operations > 1 && backend.supportsCoalescing()) {
    if (together_) backend_.startCoalescing();
  }
  ~Works() {
    if (!together_ || ended_) return;
    try {
      backend_.endCoalescing();
    } catch (...) {  // The first exception says more.
    }
  }
  Works(const Works&) = delete;
  Works& operator=(const Works&) = delete;

  void add(c10::intrusive_ptr<c10d::Work> work) {
    if (!together_) works_.push_back(std::move(work));
  }

  std::vector<c10::intrusive_ptr<c10d::Work>> end() {
    ended_ = true;
    if (together_) {
      if (auto work = backend_.endCoalescing()) works_.push_back(std::move(work));
    }
    return std::move(works_);
  }

 private:
  c10d::Backend& backend_;
  const bool together_;
  bool ended_ = false;
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

// On CUDA the current stream waits, not the host.
void wait_all(const std::vector<c10::intrusive_ptr<c10d::Work>>& works) {
  for (const auto& work : works) work->wait();
}

class NativeGather final : public GroupPending {
 public:
  NativeGather(std::shared_ptr<Group> group, const Call& call, const Label& label, std::span<const GatherPiece> pieces)
      : GroupPending(std::move(group), call, label), pieces_(pieces.begin(), pieces.end()) {}
  ~NativeGather() override { settle(); }

 protected:
  void post() override {
    if (group_->row.size() == 1) {
      for (const GatherPiece& piece : pieces_) copy_own_shard(piece, 0);
      return;
    }
    Works works(*group_->data, pieces_.size());
    for (const GatherPiece& piece : pieces_) {
      if (piece.shard.numel() == 0) continue;
      at::Tensor full = flat_view(piece.full, 0, piece.full.numel());
      at::Tensor shard = flat_view(piece.shard, 0, piece.shard.numel());
      works.add(group_->data->_allgather_base(full, shard));
    }
    works_ = works.end();
  }
  void finish() override { wait_all(works_); }
  void forget() noexcept override { works_.clear(); }

 private:
  const std::vector<GatherPiece> pieces_;
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

class NativeReduce final : public GroupPending {
 public:
  NativeReduce(std::shared_ptr<Group> group, const Call& call, const Label& label, std::span<const ReducePiece> pieces, double scale)
      : GroupPending(std::move(group), call, label), pieces_(pieces.begin(), pieces.end()), scale_(scale) {}
  ~NativeReduce() override { settle(); }

 protected:
  void post() override {
    if (group_->row.size() == 1) return;
    c10d::Backend& backend = *group_->data;
    Works works(backend, pieces_.size());
    std::vector<std::int64_t> equal_parts;
    for (const ReducePiece& piece : pieces_) {
      if (piece.out.numel() == 0) continue;
      const at::ScalarType dtype = piece.unreduced.scalar_type();
      at::Tensor input = flat_view(piece.unreduced, 0, piece.unreduced.numel());
      at::Tensor output = flat_view(piece.staging, 0, staging_numel(piece.out.numel(), dtype, group_->row.size()));
      if (backend_sums(dtype)) {
        works.add(backend._reduce_scatter_base(output, input));
      } else {
        works.add(backend.alltoall_base(output, input, equal_parts, equal_parts));
      }
    }
    works_ = works.end();
  }
  void finish() override {
    wait_all(works_);
    for (const ReducePiece& piece : pieces_) {
      if (piece.out.numel() > 0) sum(piece);
    }
  }
  void forget() noexcept override { works_.clear(); }

 private:
  void sum(const ReducePiece& piece) {
    const std::int64_t numel = piece.out.numel();
    const int size = group_->row.size();
    std::vector<at::Tensor> sources;
    if (size == 1) {
      sources.push_back(piece.unreduced);
    } else if (backend_sums(piece.unreduced.scalar_type())) {
      sources.push_back(flat_view(piece.staging, 0, numel));
    } else {
      for (int rank = 0; rank < size; ++rank) sources.push_back(flat_view(piece.staging, rank * numel, numel));
    }
    rank_order_sum(sources, piece.out, scale_, piece.accumulate);
  }

  const std::vector<ReducePiece> pieces_;
  const double scale_;
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

class NativeScatter final : public GroupPending {
 public:
  NativeScatter(std::shared_ptr<Group> group, const Call& call, const Label& label, std::span<const ScatterPiece> pieces, int root)
      : GroupPending(std::move(group), call, label), pieces_(pieces.begin(), pieces.end()), root_(root) {}
  ~NativeScatter() override { settle(); }

 protected:
  void post() override {
    // By messages, as the parts may differ in size. Each is a tensor of a list, as c10d takes them.
    std::vector<at::Tensor> argument(1);
    for (const ScatterPiece& piece : pieces_) {
      if (group_->row.rank != root_) {
        if (piece.into.numel() == 0) continue;
        argument[0] = flat_view(piece.into, 0, piece.into.numel());
        works_.push_back(group_->data->recv(argument, root_, /*tag=*/0));
        continue;
      }
      for (int peer = 0; peer < group_->row.size(); ++peer) {
        const at::Tensor& part = piece.parts[static_cast<std::size_t>(peer)];
        if (peer == root_ || part.numel() == 0) continue;
        argument[0] = flat_view(part, 0, part.numel());
        works_.push_back(group_->data->send(argument, peer, /*tag=*/0));
      }
      copy_own_part(piece, root_);
    }
  }
  void finish() override { wait_all(works_); }
  void forget() noexcept override { works_.clear(); }

 private:
  const std::vector<ScatterPiece> pieces_;
  const int root_;
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

}  // namespace

NativeCommunicator::NativeCommunicator(Row row, c10::intrusive_ptr<c10d::Backend> backend, c10::intrusive_ptr<c10d::Backend> control)
    : GroupCommunicator(std::move(row), std::move(control), std::move(backend)) {}

std::int64_t NativeCommunicator::staging_numel(std::int64_t shard_numel, at::ScalarType wire_dtype) const {
  return comm::staging_numel(shard_numel, wire_dtype, size());
}

std::unique_ptr<Pending> NativeCommunicator::all_gather(std::span<const GatherPiece> pieces, const Label& label) {
  const std::int64_t bytes = check_pieces(pieces, size());
  const Call call = begin(label, bytes, sizes_of(pieces));
  auto pending = std::make_unique<NativeGather>(group(), call, label, pieces);
  pending->start();
  stats_.all_gather_bytes += (size() - 1) * bytes;
  ++stats_.all_gathers;
  return pending;
}

std::unique_ptr<Pending> NativeCommunicator::reduce_scatter(std::span<const ReducePiece> pieces, double scale, const Label& label) {
  const std::int64_t bytes = check_pieces(pieces, *this);
  const Call call = begin(label, bytes, sizes_of(pieces));
  auto pending = std::make_unique<NativeReduce>(group(), call, label, pieces, scale);
  pending->start();
  stats_.reduce_scatter_bytes += (size() - 1) * bytes;
  ++stats_.reduce_scatters;
  return pending;
}

std::unique_ptr<Pending> NativeCommunicator::scatter(std::span<const ScatterPiece> pieces, int root, const Label& label) {
  const std::int64_t bytes = check_pieces(pieces, root, *this);
  const Call call = begin(label, 0, mix(pieces.size(), static_cast<std::uint64_t>(root)));  // the ranks' parts differ in size
  auto pending = std::make_unique<NativeScatter>(group(), call, label, pieces, root);
  pending->start();
  stats_.scatter_bytes += bytes;
  ++stats_.scatters;
  return pending;
}

}  // namespace fsdp::comm
