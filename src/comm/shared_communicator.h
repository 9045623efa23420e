#pragma once

#include <memory>
#include <utility>

#include "comm/pairwise_communicator.h"

namespace fsdp::comm {

/// Collectives of ranks that share memory: a gather copies each peer's shard from where it lies, and a reduction adds up the peers'
/// unreduced buffers where they lie, in rank order, so that it needs no staging. What does not lie in the rank's shared heap is copied
/// there first. Scatters and small exchanges are messages, as a PairwiseCommunicator's. See the note in shared_row.h.
class SharedCommunicator final : public PairwiseCommunicator {
 public:
  SharedCommunicator(Row row, const c10::intrusive_ptr<c10d::Backend>& gloo, std::shared_ptr<SharedRow> shared)
      : PairwiseCommunicator(std::move(row), gloo, std::move(shared)) {}

  std::int64_t staging_numel(std::int64_t) const override { return 0; }

 private:
  std::unique_ptr<GroupPending> make_gather(const Call& call, const Label& label, std::span<const GatherPart> parts) override;
  std::unique_ptr<GroupPending> make_reduce(const Call& call, const Label& label, std::span<const ReducePart> parts, double scale) override;
};

}  // namespace fsdp::comm
