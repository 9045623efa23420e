#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>

#include "comm/communicator.h"
#include "comm/rank_order_sum.h"

// [Rounded once] Reductions whose contributions are rounded before they are sent (ReducePart::encoding), on the CPU.
namespace fsdp::comm {

/// The size of a contribution to a part as it is sent: encoded, or in the dtype of `unreduced`.
std::int64_t contribution_bytes(const ReducePart& part);

/// Sums `sources` in their order, in fp32, and encodes the sum as the contribution that `sender` sends to `receiver`. Each source points to
/// part.out.numel() elements of the dtype of `unreduced`, or is null and counts as zeros. Senders and receivers are numbers of ranks, or of
/// hosts. Changes the part of `encoding.lost` that belongs to the receiver.
void encode_contribution(const ReducePart& part, std::span<const void* const> sources, int sender, int receiver, void* encoded);

/// A contribution to a sum. Without data, it counts as zeros.
struct Contribution {
  const void* data = nullptr;
  bool is_encoded = false;
};

/// Writes the sum of the contributions, in their order, to part.out: a rank_order_sum in fp32. `exact` is the dtype of contributions that
/// are not encoded.
void sum_contributions(const ReducePart& part, std::span<const Contribution> contributions, at::ScalarType exact, const SumEnd& end);

}  // namespace fsdp::comm
