#pragma once

#include <c10/core/Stream.h>

#include <cstdint>
#include <optional>
#include <span>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "base/rounded_rows.h"
#include "comm/collectives/group.h"
#include "comm/communicator.h"
#include "comm/rank_order_sum.h"
#include "comm/traffic.h"

namespace fsdp::comm {

/// A reduce-scatter of bfloat16 or half by a backend's messages, in pieces: a piece has the same elements of every shard. In one level, all
/// ranks send each other what they sum. In two, the ranks of a host do, and then add up the hosts' sums (fp32) between ranks of equal place
/// (see the note Two levels in shared_communicator.h). What a rank sums of its own is not sent.
///
/// [Rounded once] Parts with an encoding, also of fp32, are summed in two levels (SumLevels::of_rounded). The hosts' sums are encoded
/// before they are sent. Where each rank counts as a host, these are its gradients.
class MessageSum {
 public:
  MessageSum(const Row& row, c10::intrusive_ptr<c10d::Backend> backend, const SumLevels& levels);

  /// Elements [begin, begin + numel) of each shard of a part, and the memory that they take. In one level, `staging` receives. In two, it
  /// begins with this host's sums; the rest receives the neighbours' gradients and, after these have been summed, the other hosts' sums.
  /// With an encoding, the rest then has this host's encoded sums, and behind them the others', which are decoded into the place of the
  /// sums that have been sent.
  struct Piece {
    const ReducePart* part;
    std::int64_t begin;
    std::int64_t numel;
    at::Tensor staging;

    /// Returns these elements of this rank's unreduced gradients, in the shard of `rank`.
    at::Tensor unreduced(std::int64_t rank) const;
    /// Returns these elements of the result.
    at::Tensor out() const;
    /// Returns the bytes that one of this host's sums takes in `staging`.
    std::int64_t sum_bytes() const;
  };
  /// Returns piece number `number` of each part that has so many. Every part has at least one element.
  std::vector<Piece> pieces(std::span<const ReducePart* const> parts, std::int64_t number) const;
  /// Returns the number of pieces of the part that has most.
  std::int64_t count(std::span<const ReducePart* const> parts) const;

  const SumLevels& levels() const { return levels_; }

  /// Returns a stream for the sums after which more messages are posted: those between two levels, and those of all pieces but the last. It
  /// is ordered behind the current stream. With it, all messages can be posted at once, in the order of the collectives, and neither the
  /// host nor the computation waits. It is always the same stream, so that its temporary tensors share their memory. On the CPU, where
  /// there are no streams, the host waits.
  c10::Stream stream_behind_current(c10::Device device);
  /// Orders the current stream behind that one after a failure, so that memory which its sums use can be freed.
  void rejoin() noexcept;

  using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;
  /// Sends the neighbours the gradients that each of them has to sum: for itself, and for the ranks of equal place.
  Works send_unreduced(std::span<const Piece> pieces) const;
  /// Sums the gradients that have arrived, and this rank's own, on the current stream. In one level, the sums are the results, multiplied
  /// by `scale`. In two, they are encoded if the parts have an encoding.
  void sum_neighbours(std::span<const Piece> pieces, double scale) const;
  /// In two levels: sends these sums to the ranks of equal place.
  Works send_sums(std::span<const Piece> pieces) const;
  /// In two levels: decodes the sums that have arrived, and adds them up with this rank's own, in the order of the hosts.
  void sum_hosts(std::span<const Piece> pieces, double scale) const;

 private:
  // Sums for several hosts are computed together, up to this many elements. This takes fewer kernels, and a few temporary tensors of that
  // size.
  static constexpr std::int64_t kSummedTogether = std::int64_t{1} << 22;

  /// The messages that this rank and another one exchange.
  struct Message {
    int peer;
    at::Tensor received;
    at::Tensor sent;
  };
  Works post(std::span<const std::vector<Message>> of_pieces) const;
  std::int64_t piece_numel(const ReducePart& part) const;
  std::vector<RankOrderSum> sums_of_neighbours(const Piece& piece) const;
  void sum_neighbours_by_operators(const Piece& piece) const;

  int rank_of(std::int64_t host, std::int64_t place) const { return static_cast<int>(host * levels_.ranks + place); }
  int other(std::int64_t host) const { return static_cast<int>(host < host_ ? host : host - 1); }  ///< Its number without this one.
  /// The places in `staging` of this host's sum for the rank of equal place on `host`, and of the sum of `host` for this rank.
  at::Tensor sum_for(const Piece& piece, std::int64_t host) const;
  at::Tensor sum_of(const Piece& piece, std::int64_t host) const;
  /// The place of what encoding makes of this host's sums for the other hosts, or of the sums that they send.
  enum class Direction : std::uint8_t { kSent, kReceived };
  at::Tensor encoded(const Piece& piece, Direction direction) const;
  std::vector<RoundedRows> rows(std::span<const Piece> pieces, Direction direction) const;
  /// The place in `staging` of a neighbour's gradients for the ranks of this place, one host after the other.
  at::Tensor of_neighbour(const Piece& piece, std::int64_t place) const;

  const c10::intrusive_ptr<c10d::Backend> backend_;
  const SumLevels levels_;
  const Row row_;
  const std::int64_t host_;   // the number of this rank's host
  const std::int64_t place_;  // this rank's number on its host
  std::optional<c10::Stream> stream_;
};

}  // namespace fsdp::comm
