#include "comm/native_communicator.h"

#include <vector>

#include "comm/parts.h"
#include "comm/rank_order_sum.h"

namespace fsdp::comm {
namespace {

bool backend_sums(at::ScalarType dtype) { return dtype == at::kFloat || dtype == at::kDouble; }

std::int64_t staging_numel(std::int64_t shard_numel, at::ScalarType dtype, int size) {
  if (size == 1) return 0;
  return backend_sums(dtype) ? shard_numel : size * shard_numel;
}

// The c10d works of one collective of ours. Operations posted between the constructor and end() are launched together where the backend can
// (NCCL: one kernel for all parts). Without end(), after an exception, the destructor ends what has been posted: the backend must not take
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
  NativeGather(std::shared_ptr<Group> group, const Call& call, const Label& label, std::span<const GatherPart> parts)
      : GroupPending(std::move(group), call, label), parts_(parts.begin(), parts.end()) {}
  ~NativeGather() override { settle(); }

 protected:
  void post() override {
    if (group_->row.size() == 1) {
      for (const GatherPart& part : parts_) copy_own_shard(part, 0);
      return;
    }
    Works works(*group_->data, parts_.size());
    for (const GatherPart& part : parts_) {
      if (part.shard.numel() == 0) continue;
      at::Tensor full = flat_view(part.full, 0, part.full.numel());
      at::Tensor shard = flat_view(part.shard, 0, part.shard.numel());
      works.add(group_->data->_allgather_base(full, shard));
    }
    works_ = works.end();
  }
  void finish() override { wait_all(works_); }
  void forget() noexcept override { works_.clear(); }

 private:
  const std::vector<GatherPart> parts_;
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

class NativeReduce final : public GroupPending {
 public:
  NativeReduce(std::shared_ptr<Group> group, const Call& call, const Label& label, std::span<const ReducePart> parts, double scale)
      : GroupPending(std::move(group), call, label), parts_(parts.begin(), parts.end()), scale_(scale) {}
  ~NativeReduce() override { settle(); }

 protected:
  void post() override {
    if (group_->row.size() == 1) return;
    c10d::Backend& backend = *group_->data;
    Works works(backend, parts_.size());
    std::vector<std::int64_t> equal_parts;
    for (const ReducePart& part : parts_) {
      if (part.out.numel() == 0) continue;
      const at::ScalarType dtype = part.unreduced.scalar_type();
      at::Tensor input = flat_view(part.unreduced, 0, part.unreduced.numel());
      at::Tensor output = flat_view(part.staging, 0, staging_numel(part.out.numel(), dtype, group_->row.size()));
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
    for (const ReducePart& part : parts_) {
      if (part.out.numel() > 0) sum(part);
    }
  }
  void forget() noexcept override { works_.clear(); }

 private:
  void sum(const ReducePart& part) {
    const std::int64_t numel = part.out.numel();
    const int size = group_->row.size();
    std::vector<at::Tensor> sources;
    if (size == 1) {
      sources.push_back(part.unreduced);
    } else if (backend_sums(part.unreduced.scalar_type())) {
      sources.push_back(flat_view(part.staging, 0, numel));
    } else {
      for (int rank = 0; rank < size; ++rank) sources.push_back(flat_view(part.staging, rank * numel, numel));
    }
    rank_order_sum(sources, part.out, scale_, part.accumulate);
  }

  const std::vector<ReducePart> parts_;
  const double scale_;
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

class NativeScatter final : public GroupPending {
 public:
  NativeScatter(std::shared_ptr<Group> group, const Call& call, const Label& label, std::span<const ScatterPart> parts, int root)
      : GroupPending(std::move(group), call, label), parts_(parts.begin(), parts.end()), root_(root) {}
  ~NativeScatter() override { settle(); }

 protected:
  void post() override {
    // By messages, as the shards may differ in size. Each is a tensor of a list, as c10d takes them.
    std::vector<at::Tensor> argument(1);
    for (const ScatterPart& part : parts_) {
      if (group_->row.rank != root_) {
        if (part.into.numel() == 0) continue;
        argument[0] = flat_view(part.into, 0, part.into.numel());
        works_.push_back(group_->data->recv(argument, root_, /*tag=*/0));
        continue;
      }
      for (int peer = 0; peer < group_->row.size(); ++peer) {
        const at::Tensor& shard = part.shards[static_cast<std::size_t>(peer)];
        if (peer == root_ || shard.numel() == 0) continue;
        argument[0] = flat_view(shard, 0, shard.numel());
        works_.push_back(group_->data->send(argument, peer, /*tag=*/0));
      }
      copy_root_shard(part, root_);
    }
  }
  void finish() override { wait_all(works_); }
  void forget() noexcept override { works_.clear(); }

 private:
  const std::vector<ScatterPart> parts_;
  const int root_;
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

}  // namespace

NativeCommunicator::NativeCommunicator(Row row, c10::intrusive_ptr<c10d::Backend> backend, c10::intrusive_ptr<c10d::Backend> control)
    : GroupCommunicator(std::move(row), std::move(control), std::move(backend)) {}

std::int64_t NativeCommunicator::staging_numel(std::int64_t shard_numel, at::ScalarType wire_dtype) const {
  return comm::staging_numel(shard_numel, wire_dtype, size());
}

bool NativeCommunicator::use_own_memory(c10::Device device, bool use) {
  if (group()->data == nullptr || !group()->data->supportsTensorAlloc(device.index())) return false;
  // NCCL's allocator registers memory with the communicator, which is otherwise made by the first collective.
  if (use) group()->data->eagerConnectSingleDevice(device);
  return true;
}

c10::DataPtr NativeCommunicator::allocate(c10::Device device, std::int64_t bytes) {
  return memory_of(group()->data->allocateTensor(bytes, at::TensorOptions().dtype(at::kByte).device(device)));
}

std::unique_ptr<GroupPending> NativeCommunicator::make_gather(const Call& call, const Label& label, std::span<const GatherPart> parts) {
  return std::make_unique<NativeGather>(group(), call, label, parts);
}

std::unique_ptr<GroupPending> NativeCommunicator::make_reduce(const Call& call, const Label& label, std::span<const ReducePart> parts,
                                                              double scale) {
  return std::make_unique<NativeReduce>(group(), call, label, parts, scale);
}

std::unique_ptr<GroupPending> NativeCommunicator::make_scatter(const Call& call, const Label& label, std::span<const ScatterPart> parts,
                                                               int root) {
  return std::make_unique<NativeScatter>(group(), call, label, parts, root);
}

}  // namespace fsdp::comm
