#pragma once

#include <memory>
#include <span>
#include <vector>

#include "comm/null_communicator.h"

namespace fsdp::torch_python {

/// Replaces torch's "fake" process group, which has no peers: a gather fills this rank's own region and leaves the others as they are, a
/// reduction sums this rank's own terms. (torch's fills all regions with this rank's shard, at a cost that grows with the ranks.)
class FakeCommunicator final : public comm::NullCommunicator {
 public:
  using comm::NullCommunicator::NullCommunicator;

  std::int64_t staging_numel(std::int64_t shard_numel) const override { return 0; }
  std::int64_t staging_numel(std::int64_t shard_numel, at::ScalarType wire_dtype) const override { return 0; }
  std::unique_ptr<comm::Pending> all_gather(std::span<const comm::GatherPart> parts, const comm::Label& label) override;
  std::unique_ptr<comm::Pending> gather_uneven(std::span<const comm::UnevenPart> parts, const std::vector<bool>& receives,
                                               const comm::Label& label) override;
  std::unique_ptr<comm::Pending> reduce_scatter(std::span<const comm::ReducePart> parts, double scale, const comm::Label& label) override;
};

}  // namespace fsdp::torch_python
