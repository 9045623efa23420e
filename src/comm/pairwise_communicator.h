#pragma once

#include <memory>
#include <utility>

#include "comm/group_communicator.h"

namespace fsdp::comm {

/// Collectives as messages between all pairs of ranks, from and into the callers' own buffers: for Gloo, whose native ones allocate, copy,
/// and send twice the bytes (docs/design.md has the numbers). A reduce-scatter receives into staging and sums there in rank order when it
/// is waited for.
class PairwiseCommunicator final : public GroupCommunicator {
 public:
  PairwiseCommunicator(Row row, const c10::intrusive_ptr<c10d::Backend>& gloo) : GroupCommunicator(std::move(row), gloo, gloo) {}

  std::int64_t staging_numel(std::int64_t shard_numel) const override { return (size() - 1) * shard_numel; }
  std::unique_ptr<Pending> all_gather(std::span<const GatherPiece> pieces, const Label& label) override;
  std::unique_ptr<Pending> reduce_scatter(std::span<const ReducePiece> pieces, double scale, const Label& label) override;
  std::unique_ptr<Pending> scatter(std::span<const ScatterPiece> pieces, int root, const Label& label) override;
};

}  // namespace fsdp::comm
