#include "torch_python/fake_communicator.h"

#include <array>

#include "comm/parts.h"
#include "comm/rank_order_sum.h"

namespace fsdp::torch_python {

std::unique_ptr<comm::Pending> FakeCommunicator::all_gather(std::span<const comm::GatherPart> parts, const comm::Label& label) {
  for (const auto& part : parts) comm::copy_own_shard(part, rank());
  return NullCommunicator::all_gather(parts, label);
}

std::unique_ptr<comm::Pending> FakeCommunicator::gather_uneven(std::span<const comm::UnevenPart> parts, const std::vector<bool>& receives,
                                                               const comm::Label& label) {
  for (const auto& part : parts) comm::copy_own_bytes(part, rank());
  return NullCommunicator::gather_uneven(parts, receives, label);
}

std::unique_ptr<comm::Pending> FakeCommunicator::reduce_scatter(std::span<const comm::ReducePart> parts, double scale,
                                                                const comm::Label& label) {
  for (const auto& part : parts) {
    const auto numel = part.out.numel();
    const std::array<at::Tensor, 1> own = {comm::flat_view(comm::unreduced_or_zeros(part, rank()), rank() * numel, numel)};
    comm::rank_order_sum(own, part.out, comm::sum_end(part, scale));
  }
  return NullCommunicator::reduce_scatter(parts, scale, label);
}

}  // namespace fsdp::torch_python
