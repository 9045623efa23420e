#pragma once

#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "comm/collectives/coalesced_works.h"
#include "comm/collectives/group.h"
#include "comm/communicator.h"
#include "comm/rank_order_sum.h"
#include "comm/traffic.h"

namespace fsdp::comm {

/// A reduce-scatter of bfloat16 or half over several hosts, by a backend's messages. It first sums within each host, and then adds up the
/// hosts' sums (fp32) between ranks of equal place (see the note Two levels in shared_communicator.h). `staging` begins with this host's
/// sums. The rest of it receives the neighbours' gradients, and, after these have been summed, the sums of the other hosts.
class TwoLevelSum {
 public:
  TwoLevelSum(const Row& row, c10::intrusive_ptr<c10d::Backend> backend, const TwoLevels& levels);

  /// Returns a stream for the sums between the two levels, ordered behind the current stream. With it, all messages can be posted at once,
  /// in the order of the collectives, and neither the host nor the computation waits. It is always the same stream, so that its temporary
  /// tensors share their memory. On the CPU, where there are no streams, the host waits.
  c10::Stream stream_behind_current(c10::Device device);

  /// Sends the neighbours the gradients that each of them has to sum, for the ranks of equal place.
  void send_unreduced(const ReducePart& part, CoalescedWorks& works) const;
  /// Sums the gradients that have arrived, and this rank's own. On the current stream.
  void sum_neighbours(std::span<const ReducePart> parts) const;
  /// Sends these sums to the ranks of equal place.
  void send_sums(const ReducePart& part, CoalescedWorks& works) const;
  /// Returns the sums of all hosts, in the order of the hosts. Call it after they have arrived. That of own_host() lies apart.
  std::vector<at::Tensor> sums(const ReducePart& part) const;
  std::int64_t own_host() const { return host_; }

 private:
  static constexpr std::int64_t kSumElements = TwoLevels::kSumElements;
  // Sums for several hosts are computed together, up to this many elements. This takes fewer kernels, and a few temporary tensors of that
  // size.
  static constexpr std::int64_t kSummedTogether = std::int64_t{1} << 22;

  std::vector<RankOrderSum> sums_of_neighbours(const ReducePart& part) const;
  void sum_neighbours_by_operators(const ReducePart& part) const;

  int rank_of(std::int64_t host, std::int64_t place) const { return static_cast<int>(host * ranks_ + place); }
  at::Tensor sum_for(const ReducePart& part,
                     std::int64_t host) const;  ///< The place in `staging` of this host's sum for the rank of equal place on `host`.
  at::Tensor sum_of(const ReducePart& part, std::int64_t host) const;  ///< The place in `staging` of the sum of `host` for this rank.
  /// The place in `staging` of a neighbour's gradients for the ranks of this place, one host after the other.
  at::Tensor of_neighbour(const ReducePart& part, std::int64_t place) const;

  const c10::intrusive_ptr<c10d::Backend> backend_;
  const std::int64_t ranks_;  // on each host
  const std::int64_t hosts_;
  const std::int64_t host_;   // the number of this rank's host
  const std::int64_t place_;  // this rank's number on its host
  std::optional<c10::Stream> stream_;
};

}  // namespace fsdp::comm
