#pragma once

#include <memory>

#include "comm/group_communicator.h"
#include "comm/two_level_sum.h"

namespace fsdp::comm {

/// Collectives by the backend's own all-gather, reduce-scatter and all-to-all, without waiting on the host: for NCCL (any c10d backend
/// does). fp32 and fp64 are summed by the backend; bfloat16 and half, which it would also add up in bfloat16 and half, travel by
/// all-to-all and are summed here, in fp32 and rank order. Where hosts have several ranks each, they do so in two levels (see the note Two
/// levels in shared_communicator.h): by messages within a host, whose sums then travel between ranks of equal place.
class NativeCommunicator final : public GroupCommunicator {
 public:
  /// `backend` moves tensors, `control` (Gloo) the small CPU messages. Both null in a row of one. `ranks_per_host`: as the function of that
  /// name counts them.
  NativeCommunicator(Row row, c10::intrusive_ptr<c10d::Backend> backend, c10::intrusive_ptr<c10d::Backend> control, int ranks_per_host = 1);

  std::int64_t staging_numel(std::int64_t shard_numel) const override { return staging_numel(shard_numel, at::kHalf); }
  std::int64_t staging_numel(std::int64_t shard_numel, at::ScalarType wire_dtype) const override;
  bool use_memory(c10::Device device, BufferMemory memory) override;  ///< Its collectives need nothing beside the caller's buffers.
  c10::DataPtr allocate(c10::Device device, std::int64_t bytes) override;

 private:
  std::unique_ptr<GroupPending> make_gather(const Call& call, const Label& label, std::span<const GatherPart> parts) override;
  std::unique_ptr<GroupPending> make_reduce(const Call& call, const Label& label, std::span<const ReducePart> parts, double scale) override;
  std::unique_ptr<GroupPending> make_scatter(const Call& call, const Label& label, std::span<const ScatterPart> parts, int root) override;
  Sent sent(std::int64_t bytes, std::int64_t summed_bytes) const override;

  bool has_memory(c10::Device device, BufferMemory memory) const;
  /// The group by whose name ranks find each other's symmetric memory; null where buffers lie elsewhere.
  const std::string* symmetric_group() const;

  const std::shared_ptr<TwoLevelSum> levels_;  // null where one is enough
  BufferMemory memory_ = BufferMemory::kProcess;
};

}  // namespace fsdp::comm
