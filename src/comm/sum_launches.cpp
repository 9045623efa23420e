#include "comm/sum_launches.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <optional>

namespace fsdp::comm {
namespace {

/// Returns by how many elements the sources follow each other, except for the one that lies apart. Returns nothing if they do not.
std::optional<std::int64_t> stride_of(const RankOrderSum& sum) {
  const auto& sources = sum.sources;
  const auto itemsize = static_cast<std::int64_t>(sources.front().itemsize());
  std::optional<std::int64_t> stride;
  const char* before = nullptr;
  for (std::int64_t k = 0; k < static_cast<std::int64_t>(sources.size()); ++k) {
    if (k == sum.apart) continue;
    const auto* const address = static_cast<const char*>(sources[static_cast<std::size_t>(k)].const_data_ptr());
    if (before != nullptr) {
      const std::int64_t bytes = address - before;
      if (bytes % itemsize != 0 || (stride && *stride != bytes / itemsize)) return {};
      stride = bytes / itemsize;
    }
    before = address;
  }
  return stride.value_or(0);
}

/// Returns the sum as a kernel takes it, or nothing if a kernel can't.
std::optional<DevicePart> part_of(const RankOrderSum& sum) {
  const auto count = static_cast<std::int64_t>(sum.sources.size());
  if (count > DeviceSum::kMostPieces) return {};
  const auto stride = stride_of(sum);
  if (!stride) return {};
  const auto address = [&](std::int64_t k) { return sum.sources[static_cast<std::size_t>(k)].const_data_ptr(); };
  return DevicePart{.first = address(sum.apart == 0 && count > 1 ? 1 : 0),
                    .stride = *stride,
                    .apart_piece = sum.apart == RankOrderSum::kNone ? nullptr : address(sum.apart),
                    .out = sum.out.mutable_data_ptr(),
                    .numel = sum.out.numel(),
                    .count = static_cast<std::int32_t>(count),
                    .apart = static_cast<std::int32_t>(sum.apart)};
}

}  // namespace

DeviceFunctions<LaunchSum>& device_sums() {
  static DeviceFunctions<LaunchSum> functions;
  return functions;
}

bool DeviceSums::add(const RankOrderSum& sum) {
  const auto device = sum.out.device();
  if (device_sums().of(device.type()) == nullptr) return false;
  const auto source = sum.sources.front().scalar_type();
  const auto out = sum.out.scalar_type();
  check_summable(source);
  check_summable(out);
  if (sum.out.numel() == 0) return true;
  if (sum.sources.size() == 1 && sum.sources.front().const_data_ptr() == sum.out.const_data_ptr() && changes_nothing(source, out, sum.end))
    return true;
  const auto part = part_of(sum);
  if (!part) return false;
  const auto rounding = rounding_of(source, out, sum.end);
  const auto fits = [&](const Launch& launch) {
    const DeviceSum& other = launch.sum;
    return launch.device == device && other.source == source && other.out == out && other.scale == sum.end.scale &&
           other.accumulate == sum.end.accumulate && other.rounding == rounding && other.count < DeviceSum::kMostParts;
  };
  auto found = std::find_if(launches_.begin(), launches_.end(), fits);
  if (found == launches_.end()) {
    Launch launch{.device = device, .sum = {}};
    launch.sum.source = source;
    launch.sum.out = out;
    launch.sum.scale = sum.end.scale;
    launch.sum.accumulate = sum.end.accumulate;
    launch.sum.rounding = rounding;
    found = launches_.insert(launches_.end(), launch);
  }
  found->sum.parts[found->sum.count++] = *part;
  return true;
}

void DeviceSums::launch() const {
  for (const Launch& launch : launches_) {
    const c10::DeviceGuard guard(launch.device);
    const auto stream = c10::impl::VirtualGuardImpl(launch.device.type()).getStream(launch.device);
    device_sums().of(launch.device.type())(launch.sum, stream);
  }
}

}  // namespace fsdp::comm
