#include "comm/collectives/two_level_sum.h"

#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/order_streams.h"
#include "comm/device_sums.h"
#include "comm/parts.h"
#include "comm/rank_order_sum.h"

namespace fsdp::comm {
namespace {

/// One tag serves for all messages, because messages from one rank arrive in the order in which they were sent.
constexpr int kTag = 0;

}  // namespace

TwoLevelSum::TwoLevelSum(const Row& row, c10::intrusive_ptr<c10d::Backend> backend, const TwoLevels& levels)
    : backend_(std::move(backend)),
      ranks_(levels.ranks),
      hosts_(levels.hosts),
      host_(row.rank / levels.ranks),
      place_(row.rank % levels.ranks) {}

c10::Stream TwoLevelSum::stream_behind_current(c10::Device device) {
  if (device.is_cpu()) return c10::Stream(c10::Stream::DEFAULT, device);
  const c10::impl::VirtualGuardImpl guard(device.type());
  if (!stream_) stream_ = guard.getStreamFromGlobalPool(device);
  // The current stream computes the gradients.
  order_streams(guard.getStream(device), *stream_);
  return *stream_;
}

void TwoLevelSum::send_unreduced(const ReducePart& part, CoalescedWorks& works) const {
  const std::int64_t numel = part.out.numel();
  std::vector<at::Tensor> argument(1);
  for (std::int64_t k = 1; k < ranks_; ++k) {
    const std::int64_t from = (place_ + k) % ranks_;  // No rank is everybody's first.
    const std::int64_t to = (place_ + ranks_ - k) % ranks_;
    const at::Tensor received = of_neighbour(part, from);
    for (std::int64_t host = 0; host < hosts_; ++host) {
      argument[0] = flat_view(received, host * numel, numel);
      works.add(backend_->recv(argument, rank_of(host_, from), kTag));
      argument[0] = flat_view(part.unreduced, rank_of(host, to) * numel, numel);
      works.add(backend_->send(argument, rank_of(host_, to), kTag));
    }
  }
}

void TwoLevelSum::sum_neighbours(std::span<const ReducePart> parts) const {
  const auto device = parts.front().out.device();
  if (device.is_cpu() || device_sums().of(device.type()) == nullptr) {
    for (const ReducePart& part : parts) sum_neighbours_by_operators(part);
    return;
  }
  std::vector<RankOrderSum> all;
  for (const ReducePart& part : parts) std::ranges::move(sums_of_neighbours(part), std::back_inserter(all));
  rank_order_sums(all);
}

/// Sums of several hosts are made together: fewer kernels.
void TwoLevelSum::sum_neighbours_by_operators(const ReducePart& part) const {
  const std::int64_t numel = part.out.numel();
  // By host, one row each.
  const at::Tensor own = flat_view(part.unreduced, 0, part.unreduced.numel()).view({hosts_, ranks_, numel}).select(1, place_);
  const at::Tensor sums = flat_view(part.staging, 0, hosts_ * kSumElements * numel).view(at::kFloat).view({hosts_, numel});
  const std::int64_t together = std::max<std::int64_t>(1, kSummedTogether / numel);
  for (std::int64_t host = 0; host < hosts_; host += together) {
    const std::int64_t count = std::min(together, hosts_ - host);
    RankOrderSum sum{.sources = {}, .out = sums.narrow(0, host, count)};
    for (std::int64_t place = 0; place < ranks_; ++place) {
      const at::Tensor rows = place == place_ ? own : of_neighbour(part, place).view({hosts_, numel});
      sum.sources.push_back(rows.narrow(0, host, count));
    }
    sum_by_operators({&sum, 1});
  }
}

std::vector<RankOrderSum> TwoLevelSum::sums_of_neighbours(const ReducePart& part) const {
  const std::int64_t numel = part.out.numel();
  std::vector<RankOrderSum> sums;
  for (std::int64_t host = 0; host < hosts_; ++host) {
    auto& sum = sums.emplace_back(RankOrderSum{.sources = {}, .out = sum_for(part, host), .apart = place_});
    for (std::int64_t place = 0; place < ranks_; ++place) {
      sum.sources.push_back(place == place_ ? flat_view(part.unreduced, rank_of(host, place) * numel, numel)
                                            : flat_view(of_neighbour(part, place), host * numel, numel));
    }
  }
  return sums;
}

void TwoLevelSum::send_sums(const ReducePart& part, CoalescedWorks& works) const {
  std::vector<at::Tensor> argument(1);
  for (std::int64_t k = 1; k < hosts_; ++k) {
    const std::int64_t from = (host_ + k) % hosts_;
    const std::int64_t to = (host_ + hosts_ - k) % hosts_;
    argument[0] = sum_of(part, from);
    works.add(backend_->recv(argument, rank_of(from, place_), kTag));
    argument[0] = sum_for(part, to);
    works.add(backend_->send(argument, rank_of(to, place_), kTag));
  }
}

std::vector<at::Tensor> TwoLevelSum::sums(const ReducePart& part) const {
  std::vector<at::Tensor> sums;
  for (std::int64_t host = 0; host < hosts_; ++host) sums.push_back(sum_of(part, host));
  return sums;
}

at::Tensor TwoLevelSum::sum_for(const ReducePart& part, std::int64_t host) const {
  const std::int64_t numel = kSumElements * part.out.numel();
  return flat_view(part.staging, host * numel, numel).view(at::kFloat);
}

at::Tensor TwoLevelSum::sum_of(const ReducePart& part, std::int64_t host) const {
  if (host == host_) return sum_for(part, host);
  const std::int64_t numel = kSumElements * part.out.numel();
  return flat_view(part.staging, (hosts_ + (host < host_ ? host : host - 1)) * numel, numel).view(at::kFloat);
}

at::Tensor TwoLevelSum::of_neighbour(const ReducePart& part, std::int64_t place) const {
  const std::int64_t numel = part.out.numel();
  const std::int64_t behind_sums = kSumElements * hosts_ * numel;
  return flat_view(part.staging, behind_sums + (place < place_ ? place : place - 1) * hosts_ * numel, hosts_ * numel);
}

}  // namespace fsdp::comm
