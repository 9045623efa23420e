#pragma once

#include <memory>

#include "comm/group_communicator.h"

namespace fsdp::comm {

/// Collectives by the backend's own all-gather, reduce-scatter and all-to-all, without waiting on the host: for NCCL (any c10d backend
/// does). fp32 and fp64 are summed by the backend; bfloat16 and half, which it would also add up in bfloat16 and half, travel by
/// all-to-all and are summed here, in fp32 and rank order.
class NativeCommunicator final : public GroupCommunicator {
 public:
  /// `backend` moves tensors, `control` (Gloo) the small CPU messages. Both null in a row of one.
  NativeCommunicator(Row row, c10::intrusive_ptr<c10d::Backend> backend, c10::intrusive_ptr<c10d::Backend> control);

  std::int64_t staging_numel(std::int64_t shard_numel) const override { return size() * shard_numel; }
  std::int64_t staging_numel(std::int64_t shard_numel, at::ScalarType wire_dtype) const override;
  bool use_own_memory(c10::Device device, bool use) override;  ///< Its collectives need nothing beside the caller's buffers.
  c10::DataPtr allocate(c10::Device device, std::int64_t bytes) override;

 private:
  std::unique_ptr<GroupPending> make_gather(const Call& call, const Label& label, std::span<const GatherPart> parts) override;
  std::unique_ptr<GroupPending> make_reduce(const Call& call, const Label& label, std::span<const ReducePart> parts, double scale) override;
  std::unique_ptr<GroupPending> make_scatter(const Call& call, const Label& label, std::span<const ScatterPart> parts, int root) override;
};

}  // namespace fsdp::comm
