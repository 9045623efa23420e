#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "comm/collectives/group_communicator.h"
#include "comm/collectives/message_sum.h"
#include "comm/traffic.h"

namespace fsdp::comm {

/// Collectives by the backend's own all-gather, reduce-scatter and all-to-all, without waiting on the host where the device has streams:
/// for NCCL (any c10d backend does). The first gather into a block of symmetric memory finds the peers' blocks, for which the host waits.
/// The backend sums fp32 and fp64. It would sum bfloat16 and half in these dtypes, so they are sent as messages and summed here, in fp32
/// and in rank order (MessageSum). If hosts have more than two ranks each, this takes two levels. [Rounded once] So are gradients of any
/// dtype with an encoding.
class NativeCommunicator final : public GroupCommunicator {
 public:
  /// `backend` moves tensors, `control` (Gloo) the small CPU messages. In a row of one rank, `control` is null, and so is `backend` if
  /// nothing is moved. `ranks_per_host`: see the function of that name. `ends`: whether the backend is shut down with this object.
  /// `piece_staging`: see SumLevels.
  NativeCommunicator(Row row, c10::intrusive_ptr<c10d::Backend> backend, c10::intrusive_ptr<c10d::Backend> control, int ranks_per_host = 1,
                     Group::Ends ends = Group::Ends::kElsewhere, std::int64_t piece_staging = SumLevels::kPieceStaging);

  bool is_alone() const override;
  std::int64_t staging_numel(std::int64_t shard_numel) const override {
    return std::max(staging_numel(shard_numel, at::kHalf), staging_numel(shard_numel, at::kFloat));
  }
  std::int64_t staging_numel(std::int64_t shard_numel, at::ScalarType wire_dtype) const override;
  Traffic traffic() const override { return traffic_; }
  MemorySource use_memory(c10::Device device, BufferMemory memory) override;  ///< Its collectives need nothing beside the caller's buffers.

 private:
  std::unique_ptr<GroupPending> make_gather(const Call& call, const Label& label, std::span<const GatherPart> parts) override;
  std::unique_ptr<GroupPending> make_uneven(const Call& call, const Label& label, std::span<const UnevenPart> parts,
                                            const std::vector<bool>& receives) override;
  std::unique_ptr<GroupPending> make_reduce(const Call& call, const Label& label, std::span<const ReducePart> parts, double scale) override;
  std::unique_ptr<GroupPending> make_scatter(const Call& call, const Label& label, std::span<const ScatterPart> parts, int root) override;
  Sent sent_by_absent(const Sent& sent) const override { return sent; }  // zeros

  void connect(c10::Device device);

  const std::shared_ptr<MessageSum> messages_;
  const std::shared_ptr<MessageSum> rounded_messages_;  // of parts with an encoding
  const Traffic traffic_;
  bool is_connected_ = false;
};

}  // namespace fsdp::comm
