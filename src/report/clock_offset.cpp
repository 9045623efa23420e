#include "report/clock_offset.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#include "base/stable_hash.h"

namespace fsdp::report {
namespace {

constexpr comm::Label kClocks = {.operation = "comparison of clocks", .unit = {}};
constexpr int kExchanges = 8;

/// The same for processes that have one clock: those of a kernel, in one namespace of times.
std::int64_t clock_id() {
  std::string id;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), id);
  std::error_code none;
  id += std::filesystem::read_symlink("/proc/self/ns/time", none).string();
  return static_cast<std::int64_t>(stable_hash(id));
}

}  // namespace

std::int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::int64_t clock_offset(const comm::Ranks& ranks) {
  const auto ids = ranks.exchange(at::full({1}, clock_id(), at::kLong), kClocks);
  if (ids.eq(ids[0]).all().item<bool>()) return 0;
  const auto size = ranks.size();
  const auto own = static_cast<std::size_t>(ranks.index());
  // By rank: this rank's time when that rank's message is there, less that rank's time when it sent it.
  std::vector<std::int64_t> shortest(static_cast<std::size_t>(size), std::numeric_limits<std::int64_t>::max());
  for (int i = 0; i < kExchanges; ++i) {
    const auto sent = ranks.exchange(at::full({1}, now(), at::kLong), kClocks).contiguous();
    const auto received = now();
    for (std::size_t rank = 0; rank < shortest.size(); ++rank) {
      shortest[rank] = std::min(shortest[rank], received - sent.const_data_ptr<std::int64_t>()[rank]);
    }
  }
  const auto all = ranks.exchange(at::tensor(shortest, at::kLong), kClocks);
  return (shortest[0] - all[0][static_cast<std::int64_t>(own)].item<std::int64_t>()) / 2;
}

}  // namespace fsdp::report
