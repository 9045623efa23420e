#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "comm/collectives/group_communicator.h"
#include "comm/collectives/message_thread.h"

namespace fsdp::comm {

/// Collectives as messages between all pairs of ranks, from and into the callers' own buffers: for Gloo, whose native ones allocate, copy,
/// and send twice the bytes (docs/develop/collectives.md). A reduce-scatter receives into staging and sums there in rank order
/// when it is waited for.
class PairwiseCommunicator : public GroupCommunicator {
 public:
  PairwiseCommunicator(Row row, const c10::intrusive_ptr<c10d::Backend>& gloo, std::shared_ptr<SharedRow> shared = nullptr)
      : GroupCommunicator(std::move(row), gloo, gloo, std::move(shared)) {}

  std::int64_t staging_numel(std::int64_t shard_numel) const override {
    return Traffic::by_messages(size()).staging_numel(shard_numel, at::kFloat);
  }

 protected:
  std::unique_ptr<GroupPending> make_gather(const Call& call, const Label& label, std::span<const GatherPart> parts) override;
  std::unique_ptr<GroupPending> make_uneven(const Call& call, const Label& label, std::span<const UnevenPart> parts,
                                            const std::vector<bool>& receives) override;
  std::unique_ptr<GroupPending> make_reduce(const Call& call, const Label& label, std::span<const ReducePart> parts, double scale) override;
  std::unique_ptr<GroupPending> make_scatter(const Call& call, const Label& label, std::span<const ScatterPart> parts, int root) override;

 private:
  std::shared_ptr<MessageThread> gather_thread_;  // Null before the first gather of uneven parts.
};

}  // namespace fsdp::comm
