#pragma once

#include <c10/core/ScalarType.h>
#include <c10/core/Stream.h>

#include <cstdint>

#include "base/device_functions.h"
#include "base/host_device.h"
#include "comm/sum_arithmetic.h"

// The arguments of a kernel that sums in rank order, and the work of each of its threads.
namespace fsdp::comm {

/// One sum: piece k of `count`, each of `numel` elements, lies `stride` elements behind piece k - 1. If one of them has the number `apart`,
/// it lies elsewhere, and the others lie as if it did not exist.
struct DevicePart {
  const void* first = nullptr;
  std::int64_t stride = 0;
  const void* apart_piece = nullptr;
  void* out = nullptr;
  std::int64_t numel = 0;
  std::int32_t count = 0;
  std::int32_t apart = -1;
};

/// The sums of one launch, which are alike. They are as large as the arguments of a kernel may be on every GPU: 4 KiB.
struct DeviceSum {
  static constexpr int kMostParts = 80;
  static constexpr int kMostPieces = kMostTerms;

  DevicePart parts[kMostParts] = {};
  std::int32_t count = 0;  ///< The number of parts.
  c10::ScalarType source = c10::ScalarType::Undefined;
  c10::ScalarType out = c10::ScalarType::Undefined;
  double scale = 1;
  bool accumulate = false;
  Rounding rounding = Rounding::kNone;
};
static_assert(sizeof(DeviceSum) <= 4096);

/// Puts the sums on the stream, whose device is the current one.
using LaunchSum = void(const DeviceSum& sum, const c10::Stream& stream);
DeviceFunctions<LaunchSum>& device_sums();

template <typename Source>
FSDP_HOST_DEVICE inline const Source* piece_of(const DevicePart& part, int k) {
  if (k == part.apart) return static_cast<const Source*>(part.apart_piece);
  const int row = part.apart >= 0 && k > part.apart ? k - 1 : k;
  return static_cast<const Source*>(part.first) + row * part.stride;
}

/// Returns true if all pieces can be read, and the sum can be written, by packs.
template <typename Source, typename Out>
FSDP_HOST_DEVICE inline bool has_packs(const DevicePart& part) {
  return is_aligned<Source>(part.first) && part.stride % kPack == 0 && is_aligned<Source>(part.apart_piece) && is_aligned<Out>(part.out);
}

/// Sums `kCount` neighbouring elements: a pack, or a single one.
template <typename Source, typename Out, int kCount>
FSDP_HOST_DEVICE inline void sum_elements(const DeviceSum& sum, const DevicePart& part, std::int64_t at) {
  using Acc = Accumulator<Source>;
  const auto total = pairwise_sum<Lanes<Acc, kCount>>(part.count, [&](int k) {
    const auto read = *reinterpret_cast<const Pack<Source, kCount>*>(piece_of<Source>(part, k) + at);
    Lanes<Acc, kCount> terms;
    FSDP_UNROLL
    for (int lane = 0; lane < kCount; ++lane) terms.values[lane] = static_cast<Acc>(read.values[lane]);
    return terms;
  });
  auto* const place = reinterpret_cast<Pack<Out, kCount>*>(static_cast<Out*>(part.out) + at);
  Pack<Out, kCount> result{};
  if (sum.accumulate) result = *place;
  FSDP_UNROLL
  for (int lane = 0; lane < kCount; ++lane) {
    result.values[lane] = finish(total.values[lane], static_cast<Acc>(sum.scale), result.values[lane], sum.accumulate, sum.rounding);
  }
  *place = result;
}

/// Does the work of thread number `thread` of `threads` for one part.
template <typename Source, typename Out>
FSDP_HOST_DEVICE inline void sum_part(const DeviceSum& sum, int number, std::int64_t thread, std::int64_t threads) {
  const DevicePart& part = sum.parts[number];
  std::int64_t in_packs = 0;
  if (has_packs<Source, Out>(part)) {
    in_packs = part.numel / kPack * kPack;
    for (std::int64_t at = thread * kPack; at < in_packs; at += threads * kPack) sum_elements<Source, Out, kPack>(sum, part, at);
  }
  for (std::int64_t at = in_packs + thread; at < part.numel; at += threads) sum_elements<Source, Out, 1>(sum, part, at);
}

}  // namespace fsdp::comm
