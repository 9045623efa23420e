#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "comm/collectives/message_thread.h"
#include "comm/collectives/pairwise_communicator.h"

namespace fsdp::comm {

/// Collectives of ranks that share memory, with all ranks of the row or with those of their host.
///
/// On one host, a gather copies each peer's shard from where it lies, and a reduction adds up the peers' unreduced buffers where they lie,
/// in rank order, so that it needs no staging. Data outside of the rank's shared heap are copied there first. Scatters and small exchanges
/// are messages, as a PairwiseCommunicator's. See the note in shared_row.h.
///
/// [Note: Two levels] If a row has several hosts with equal numbers of ranks, messages are sent only between ranks of equal place, and
/// every byte crosses once per host. (The place of a rank is its number on its host.) A gather first receives the shards of the ranks of
/// equal place, and then copies those that the neighbours have received. A reduction first sums the neighbours' gradients for each rank of
/// equal place, sends these sums (fp32, fp64 for double, or encoded), and adds up the sums that it receives, in the order of the hosts. If
/// the number of ranks on a host is a power of two, the result has the bits of one sum over all ranks (see rank_order_sum.h).
class SharedCommunicator final : public PairwiseCommunicator {
 public:
  SharedCommunicator(Row row, const c10::intrusive_ptr<c10d::Backend>& gloo, std::shared_ptr<SharedRow> shared);

  /// The smallest dtype takes the largest number of elements.
  std::int64_t staging_numel(std::int64_t shard_numel) const override { return staging_numel(shard_numel, at::kHalf); }
  std::int64_t staging_numel(std::int64_t shard_numel, at::ScalarType wire_dtype) const override {
    return traffic_.staging_numel(shard_numel, wire_dtype);
  }
  Traffic traffic() const override { return traffic_; }

 private:
  std::unique_ptr<GroupPending> make_gather(const Call& call, const Label& label, std::span<const GatherPart> parts) override;
  std::unique_ptr<GroupPending> make_uneven(const Call& call, const Label& label, std::span<const UnevenPart> parts,
                                            const std::vector<bool>& receives) override;
  std::unique_ptr<GroupPending> make_reduce(const Call& call, const Label& label, std::span<const ReducePart> parts, double scale) override;
  Sent sent_by_absent(const Sent& sent) const override { return {.wire = sent.wire}; }  // the sums of its host
  int hosts() const { return size() / group()->shared->size(); }

  const Traffic traffic_;
  const std::shared_ptr<MessageThread> message_thread_;  // null on one host
};

}  // namespace fsdp::comm
