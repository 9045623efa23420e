#pragma once

#include <c10/core/ScalarType.h>
#include <c10/core/Stream.h>

#include <cstdint>

#include "base/device_functions.h"
#include "base/host_device.h"
#include "optim/block_adamw.h"

// A step of AdamW on a state of 8 bits as one kernel: each block of elements has as many threads, which find the largest magnitudes of
// both moments together, between the two halves of what each does.
namespace fsdp::optim {

struct DeviceMoment {
  const DynamicMap* map = nullptr;  ///< On the device.
  std::uint8_t* codes = nullptr;
  float* largest = nullptr;  ///< By block.
};

/// Float, bfloat16 or half.
struct DeviceAdamW8bit {
  void* values = nullptr;
  const void* gradients = nullptr;
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  c10::ScalarType gradient_dtype = c10::ScalarType::Undefined;
  std::int64_t numel = 0;
  DeviceMoment first;
  DeviceMoment second;
  BlockAdamW adamw;
};

/// Puts the step on the stream, whose device is the current one.
using LaunchAdamW8bit = void(const DeviceAdamW8bit& step, const c10::Stream& stream);
DeviceFunctions<LaunchAdamW8bit>& device_adamw_8bit();

/// The first half, of element `at`: the value is updated, and the moments are returned.
template <typename Value, typename Gradient>
FSDP_HOST_DEVICE inline AdamWElement update_at(const DeviceAdamW8bit& step, std::int64_t at) {
  const std::int64_t block = at / kBlock;
  Value* const value = static_cast<Value*>(step.values) + at;
  const auto gradient = static_cast<float>(static_cast<const Gradient*>(step.gradients)[at]);
  const auto updated = update_element(step.adamw, gradient,
                                      {static_cast<float>(*value), step.first.map->decode(step.first.codes[at]) * step.first.largest[block],
                                       step.second.map->decode(step.second.codes[at]) * step.second.largest[block]});
  *value = static_cast<Value>(updated.value);
  return updated;
}

/// The second half of one moment: the code of element `at`, when the block's largest magnitude is known.
FSDP_HOST_DEVICE inline void encode_at(const DeviceMoment& moment, std::int64_t at, float x, float largest) {
  moment.codes[at] = static_cast<std::uint8_t>(moment.map->encode(x / divisor_for(largest)));
  if (at % kBlock == 0) moment.largest[at / kBlock] = largest;
}

}  // namespace fsdp::optim
