#include "report/clock_offset.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <vector>

#include "events/event_memory.h"

namespace fsdp::report {
namespace {

constexpr comm::Label kClocks = {.operation = "comparison of clocks", .unit = {}};
constexpr int kExchanges = 8;

}  // namespace

std::int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::int64_t clock_offset(const comm::Ranks& ranks) {
  const auto ids = ranks.exchange(at::full({1}, static_cast<std::int64_t>(events::clock_id()), at::kLong), kClocks);
  return ids.eq(ids[0]).all().item<bool>() ? 0 : measured_offset(ranks, &now);
}

std::int64_t measured_offset(const comm::Ranks& ranks, const std::function<std::int64_t()>& clock) {
  // By rank: the shortest time from its sending a message to this rank's having it, each by its own clock.
  std::vector<std::int64_t> shortest(static_cast<std::size_t>(ranks.size()), std::numeric_limits<std::int64_t>::max());
  for (int i = 0; i < kExchanges; ++i) {
    const auto sent = ranks.exchange(at::full({1}, clock(), at::kLong), kClocks).contiguous();
    const auto received = clock();
    for (std::size_t rank = 0; rank < shortest.size(); ++rank) {
      shortest[rank] = std::min(shortest[rank], received - sent.const_data_ptr<std::int64_t>()[rank]);
    }
  }
  const auto all = ranks.exchange(at::tensor(shortest, at::kLong), kClocks);
  return (shortest[0] - all[0][ranks.index()].item<std::int64_t>()) / 2;
}

}  // namespace fsdp::report
