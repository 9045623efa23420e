#include "report/waits.h"

#include <algorithm>

namespace fsdp {

const char* to_string(WaitReason reason) {
  switch (reason) {
    case WaitReason::kLateRank:
      return "late rank";
    case WaitReason::kPrefetch:
      return "prefetch";
    case WaitReason::kQueue:
      return "queue";
    case WaitReason::kLink:
      return "link";
    case WaitReason::kHost:
      return "host";
  }
  return "";
}

namespace report {

std::int64_t late_part(const Collective& collective, std::int64_t last_call) {
  return std::clamp(last_call, collective.wait_began, collective.wait_ended) - collective.wait_began;
}

bool is_for_peer(const Collective& collective, std::int64_t last_call) {
  return 2 * late_part(collective, last_call) > collective.wait_ended - collective.wait_began;
}

std::array<std::int64_t, kWaitReasons> reasons_of(const Collective& collective, std::int64_t last_call, std::int64_t queued_bytes) {
  std::array<std::int64_t, kWaitReasons> reasons{};
  const auto of = [&](WaitReason reason) -> std::int64_t& { return reasons[static_cast<std::size_t>(reason)]; };
  const auto end = collective.wait_ended;
  of(WaitReason::kLateRank) = late_part(collective, last_call);
  const auto all_called = collective.wait_began + of(WaitReason::kLateRank);
  auto rest = end - all_called;
  if (collective.arrived != 0) of(WaitReason::kHost) = end - std::clamp(collective.arrived, all_called, end);
  rest -= of(WaitReason::kHost);
  const auto bytes = queued_bytes + collective.call.bytes;
  if (bytes > 0) {
    of(WaitReason::kQueue) =
        static_cast<std::int64_t>(static_cast<double>(rest) * static_cast<double>(queued_bytes) / static_cast<double>(bytes));
  }
  rest -= of(WaitReason::kQueue);
  of(collective.posted_on_demand ? WaitReason::kPrefetch : WaitReason::kLink) = rest;
  return reasons;
}

std::int64_t queued_bytes(const Collective& collective, std::int64_t last_call, const std::map<CollectiveKey, Collective>& all) {
  const auto all_called = std::max(collective.posted, last_call);
  std::int64_t bytes = 0;
  for (const auto& [key, other] : all) {
    if (other.posted == 0 || other.posted >= collective.posted) continue;
    const auto done = other.arrived != 0 ? other.arrived : other.wait_ended;
    if (done == 0 || done > all_called) bytes += other.call.bytes;
  }
  return bytes;
}

}  // namespace report
}  // namespace fsdp
