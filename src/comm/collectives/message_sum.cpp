#include "comm/collectives/message_sum.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/order_streams.h"
#include "base/rounded_blocks.h"
#include "base/stable_hash.h"
#include "comm/collectives/coalesced_works.h"
#include "comm/device_sums.h"
#include "comm/parts.h"
#include "comm/rank_order_sum.h"

namespace fsdp::comm {
namespace {

/// One tag serves for all messages, because messages from one rank arrive in the order in which they were sent.
constexpr int kTag = 0;

/// `numel` elements of `dtype` that begin `offset` bytes behind the beginning of memory of another dtype or the same.
at::Tensor elements_in(const at::Tensor& memory, std::int64_t offset, std::int64_t numel, at::ScalarType dtype) {
  const auto itemsize = static_cast<std::int64_t>(memory.itemsize());
  const auto bytes = numel * static_cast<std::int64_t>(elementSize(dtype));
  const at::Tensor elements = flat_view(memory, offset / itemsize, bytes / itemsize);
  return memory.scalar_type() == dtype ? elements : elements.view(dtype);
}

bool are_encoded(std::span<const MessageSum::Piece> pieces) { return !pieces.empty() && pieces.front().part->encoding.has_value(); }

}  // namespace

MessageSum::MessageSum(const Row& row, c10::intrusive_ptr<c10d::Backend> backend, const SumLevels& levels)
    : backend_(std::move(backend)), levels_(levels), row_(row), host_(row.rank / levels.ranks), place_(row.rank % levels.ranks) {}

at::Tensor MessageSum::Piece::unreduced(std::int64_t rank) const {
  return flat_view(part->unreduced, rank * part->out.numel() + begin, numel);
}

at::Tensor MessageSum::Piece::out() const { return flat_view(part->out, begin, numel); }

std::int64_t MessageSum::Piece::sum_bytes() const {
  return (part->encoding ? padded_numel(part->encoding->format, numel) : numel) * static_cast<std::int64_t>(sizeof(float));
}

std::int64_t MessageSum::piece_numel(const ReducePart& part) const {
  const std::int64_t shard = part.out.numel();
  if (!part.encoding) return levels_.piece_numel(shard);
  return levels_.rounded_piece_numel(shard, part.encoding->format, part.unreduced.scalar_type());
}

std::vector<MessageSum::Piece> MessageSum::pieces(std::span<const ReducePart* const> parts, std::int64_t number) const {
  std::vector<Piece> pieces;
  for (const ReducePart* const part : parts) {
    const std::int64_t shard = part->out.numel();
    const std::int64_t size = piece_numel(*part);
    const std::int64_t begin = number * size;
    if (begin >= shard) continue;
    const std::int64_t numel = std::min(size, shard - begin);
    const auto staged = [&](std::int64_t elements) {
      if (!part->encoding) return levels_.staging_per_element() * elements;
      return levels_.rounded_piece_bytes(elements, part->encoding->format, part->unreduced.scalar_type());
    };
    const auto staging = flat_view(part->staging, number % 2 * staged(size), staged(numel));
    pieces.push_back({.part = part, .begin = begin, .numel = numel, .staging = staging});
  }
  return pieces;
}

std::int64_t MessageSum::count(std::span<const ReducePart* const> parts) const {
  std::int64_t most = 0;
  for (const ReducePart* const part : parts) {
    const std::int64_t size = piece_numel(*part);
    most = std::max(most, (part->out.numel() + size - 1) / size);
  }
  return most;
}

c10::Stream MessageSum::stream_behind_current(c10::Device device) {
  if (device.is_cpu()) return c10::Stream(c10::Stream::DEFAULT, device);
  const c10::impl::VirtualGuardImpl guard(device.type());
  if (!stream_) stream_ = guard.getStreamFromGlobalPool(device);
  // The current stream computes the gradients.
  order_streams(guard.getStream(device), *stream_);
  return *stream_;
}

void MessageSum::rejoin() noexcept {
  if (!stream_) return;
  try {
    order_streams(*stream_, c10::impl::VirtualGuardImpl(stream_->device_type()).getStream(stream_->device()));
  } catch (...) {  // The device has failed. The first exception has more information.
  }
}

/// A backend like NCCL takes the messages between all ranks as one call for each piece. If hosts have several ranks, the two levels have
/// messages between few of them.
MessageSum::Works MessageSum::post(std::span<const std::vector<Message>> of_pieces) const {
  const bool by_lists = (levels_.ranks == 1 || levels_.hosts == 1) && is_like_nccl(*backend_);
  CoalescedWorks works(*backend_, /*several=*/!by_lists || of_pieces.size() > 1);
  std::vector<at::Tensor> argument(1);
  for (const auto& messages : of_pieces) {
    if (by_lists) {
      std::vector<at::Tensor> received(static_cast<std::size_t>(row_.size()), flat_view(messages.front().received, 0, 0));
      auto sent = received;  // Nothing to this rank itself.
      for (const Message& message : messages) {
        received[static_cast<std::size_t>(message.peer)] = message.received;
        sent[static_cast<std::size_t>(message.peer)] = message.sent;
      }
      works.add(backend_->alltoall(received, sent));
      continue;
    }
    for (const Message& message : messages) {
      argument[0] = message.received;
      works.add(backend_->recv(argument, message.peer, kTag));
      argument[0] = message.sent;
      works.add(backend_->send(argument, message.peer, kTag));
    }
  }
  return works.end();
}

// In both, no rank is everybody's first.

MessageSum::Works MessageSum::send_unreduced(std::span<const Piece> pieces) const {
  if (levels_.ranks == 1) return {};
  std::vector<std::vector<Message>> of_pieces(pieces.size());
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    for (std::int64_t k = 1; k < levels_.ranks; ++k) {
      const std::int64_t place = (place_ + k) % levels_.ranks;
      const at::Tensor received = of_neighbour(piece, place);
      for (std::int64_t host = 0; host < levels_.hosts; ++host) {
        of_pieces[i].push_back({.peer = rank_of(host_, place),
                                .received = flat_view(received, host * piece.numel, piece.numel),
                                .sent = piece.unreduced(rank_of(host, place))});
      }
    }
  }
  return post(of_pieces);
}

void MessageSum::sum_neighbours(std::span<const Piece> pieces, double scale) const {
  if (pieces.empty()) return;
  const auto device = pieces.front().part->out.device();
  if (levels_.are_two() && (device.is_cpu() || device_sums().of(device.type()) == nullptr)) {
    for (const Piece& piece : pieces) sum_neighbours_by_operators(piece);
  } else {
    std::vector<RankOrderSum> all;
    for (const Piece& piece : pieces) {
      auto sums = sums_of_neighbours(piece);
      if (!levels_.are_two()) {
        sums.front().out = piece.out();
        sums.front().end = sum_end(*piece.part, scale);
      }
      std::ranges::move(sums, std::back_inserter(all));
    }
    rank_order_sums(all);
  }
  if (are_encoded(pieces)) encode_rows(pieces.front().part->encoding->format, rows(pieces, Direction::kSent));
}

/// Sums of several hosts are made together: fewer kernels.
void MessageSum::sum_neighbours_by_operators(const Piece& piece) const {
  const auto [ranks, hosts] = std::pair(levels_.ranks, levels_.hosts);
  const std::int64_t numel = piece.numel;
  const ReducePart& part = *piece.part;
  // By host, one row each.
  const at::Tensor own = flat_view(part.unreduced, 0, part.unreduced.numel())
                             .view({hosts, ranks, part.out.numel()})
                             .select(1, place_)
                             .narrow(1, piece.begin, numel);
  const std::int64_t in_row = piece.sum_bytes() / static_cast<std::int64_t>(sizeof(float));
  const at::Tensor sums = elements_in(piece.staging, 0, hosts * in_row, at::kFloat).view({hosts, in_row}).narrow(1, 0, numel);
  const std::int64_t together = std::max<std::int64_t>(1, kSummedTogether / numel);
  for (std::int64_t host = 0; host < hosts; host += together) {
    const std::int64_t count = std::min(together, hosts - host);
    RankOrderSum sum{.sources = {}, .out = sums.narrow(0, host, count)};
    for (std::int64_t place = 0; place < ranks; ++place) {
      const at::Tensor rows = place == place_ ? own : of_neighbour(piece, place).view({hosts, numel});
      sum.sources.push_back(rows.narrow(0, host, count));
    }
    sum_by_operators({&sum, 1});
  }
}

std::vector<RankOrderSum> MessageSum::sums_of_neighbours(const Piece& piece) const {
  std::vector<RankOrderSum> sums;
  for (std::int64_t host = 0; host < levels_.hosts; ++host) {
    auto& sum = sums.emplace_back(RankOrderSum{.sources = {}, .out = {}, .apart = place_});
    if (levels_.are_two()) sum.out = sum_for(piece, host);
    for (std::int64_t place = 0; place < levels_.ranks; ++place) {
      sum.sources.push_back(place == place_ ? piece.unreduced(rank_of(host, place))
                                            : flat_view(of_neighbour(piece, place), host * piece.numel, piece.numel));
    }
  }
  return sums;
}

MessageSum::Works MessageSum::send_sums(std::span<const Piece> pieces) const {
  std::vector<std::vector<Message>> of_pieces(pieces.size());
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    for (std::int64_t k = 1; k < levels_.hosts; ++k) {
      const std::int64_t host = (host_ + k) % levels_.hosts;
      auto& message = of_pieces[i].emplace_back(Message{.peer = rank_of(host, place_), .received = {}, .sent = {}});
      if (pieces[i].part->encoding) {
        const std::int64_t bytes = encoded_bytes(pieces[i].part->encoding->format, pieces[i].numel);
        message.received = flat_view(encoded(pieces[i], Direction::kReceived), other(host) * bytes, bytes);
        message.sent = flat_view(encoded(pieces[i], Direction::kSent), other(host) * bytes, bytes);
      } else {
        message.received = sum_of(pieces[i], host);
        message.sent = sum_for(pieces[i], host);
      }
    }
  }
  return post(of_pieces);
}

void MessageSum::sum_hosts(std::span<const Piece> pieces, double scale) const {
  if (are_encoded(pieces)) decode_rows(pieces.front().part->encoding->format, rows(pieces, Direction::kReceived));
  std::vector<RankOrderSum> all;
  for (const Piece& piece : pieces) {
    auto& sum = all.emplace_back(RankOrderSum{.sources = {}, .out = piece.out(), .end = sum_end(*piece.part, scale)});
    if (!piece.part->encoding) sum.apart = host_;
    for (std::int64_t host = 0; host < levels_.hosts; ++host) sum.sources.push_back(sum_of(piece, host));
  }
  rank_order_sums(all);
}

at::Tensor MessageSum::sum_for(const Piece& piece, std::int64_t host) const {
  return elements_in(piece.staging, host * piece.sum_bytes(), piece.numel, at::kFloat);
}

at::Tensor MessageSum::sum_of(const Piece& piece, std::int64_t host) const {
  if (host == host_ || piece.part->encoding) return sum_for(piece, host);
  return elements_in(piece.staging, (levels_.hosts + other(host)) * piece.sum_bytes(), piece.numel, at::kFloat);
}

at::Tensor MessageSum::of_neighbour(const Piece& piece, std::int64_t place) const {
  const std::int64_t behind_sums = levels_.are_two() ? levels_.hosts * piece.sum_bytes() : 0;
  const std::int64_t numel = levels_.hosts * piece.numel;
  const auto bytes = numel * static_cast<std::int64_t>(piece.part->unreduced.itemsize());
  return elements_in(piece.staging, behind_sums + (place < place_ ? place : place - 1) * bytes, numel, piece.part->unreduced.scalar_type());
}

at::Tensor MessageSum::encoded(const Piece& piece, Direction direction) const {
  const std::int64_t bytes = (levels_.hosts - 1) * encoded_bytes(piece.part->encoding->format, piece.numel);
  return flat_view(piece.staging, levels_.hosts * piece.sum_bytes() + (direction == Direction::kSent ? 0 : bytes), bytes);
}

std::vector<RoundedRows> MessageSum::rows(std::span<const Piece> pieces, Direction direction) const {
  std::vector<RoundedRows> all;
  for (const Piece& piece : pieces) {
    const ReducePart& part = *piece.part;
    const Encoding& encoding = *part.encoding;
    const at::Tensor &lost = encoding.lost, &reduction_number = encoding.reduction_number_on_device;
    const std::int64_t hosts = levels_.hosts, in_row = padded_numel(encoding.format, piece.numel);
    auto& added =
        all.emplace_back(RoundedRows{.values = elements_in(piece.staging, 0, hosts * in_row, at::kFloat).view({hosts, in_row}),
                                     .encoded = encoded(piece, direction).view({hosts - 1, -1}),
                                     .numel = piece.numel,
                                     .own = host_,
                                     .first = piece.begin / encoding.format.block,
                                     .key = reduction_number.defined() ? encoding.key : mix(encoding.key, encoding.reduction_number),
                                     .reduction_number = reduction_number});
    // A rank whose gradients do not count contributes zeros, and loses nothing. (A host's sum may have those of others.)
    const bool counts = levels_.ranks > 1 || gives({&part, 1}, row_.rank);
    if (direction == Direction::kReceived || !lost.defined() || !counts) continue;
    added.lost = flat_view(lost, 0, lost.numel()).view({hosts - 1, part.out.numel()}).narrow(1, piece.begin, piece.numel);
  }
  return all;
}

}  // namespace fsdp::comm
