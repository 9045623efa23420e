#include "optim/adamw_8bit_step.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <mutex>
#include <type_traits>

#include "base/parallel_for.h"
#include "fsdp/adamw_8bit.h"
#include "fsdp/error.h"
#include "optim/block_adamw.h"
#include "optim/device_adamw.h"
#include "optim/dynamic_map.h"

namespace fsdp::optim {
namespace {

static_assert(AdamW8bit::kBlock == kBlock);
static_assert(std::is_trivially_copyable_v<DynamicMap>);

const DynamicMap& first_map() {
  static const DynamicMap map(/*is_signed=*/true);
  return map;
}
const DynamicMap& second_map() {
  static const DynamicMap map(/*is_signed=*/false);
  return map;
}

// Functions that load and store blocks of parameters and gradients of any dtype.
using Load = void (*)(const void* data, std::int64_t begin, std::int64_t numel, Block& to);
using Store = void (*)(void* data, std::int64_t begin, std::int64_t numel, const Block& from);

template <typename T>
void load(const void* data, std::int64_t begin, std::int64_t numel, Block& to) {
  const auto* from = static_cast<const T*>(data) + begin;
  for (std::int64_t i = 0; i < numel; ++i) to[static_cast<std::size_t>(i)] = static_cast<float>(from[i]);
}
template <typename T>
void store(void* data, std::int64_t begin, std::int64_t numel, const Block& from) {
  auto* to = static_cast<T*>(data) + begin;
  for (std::int64_t i = 0; i < numel; ++i) to[i] = static_cast<T>(from[static_cast<std::size_t>(i)]);
}

Load load_of(at::ScalarType dtype) {
  if (dtype == at::kBFloat16) return &load<at::BFloat16>;
  return dtype == at::kHalf ? &load<at::Half> : &load<float>;
}
Store store_of(at::ScalarType dtype) {
  if (dtype == at::kBFloat16) return &store<at::BFloat16>;
  return dtype == at::kHalf ? &store<at::Half> : &store<float>;
}

BlockAdamW coefficients_of(const AdamStep& step, std::int64_t steps) {
  const double correction1 = 1 - std::pow(step.beta1, static_cast<double>(steps));
  const double correction2 = 1 - std::pow(step.beta2, static_cast<double>(steps));
  return {.beta1 = static_cast<float>(step.beta1),
          .beta2 = static_cast<float>(step.beta2),
          .eps = static_cast<float>(step.eps),
          .decay = static_cast<float>(1 - step.lr * step.weight_decay),
          .step_size = static_cast<float>(step.lr / correction1),
          .second_scale = static_cast<float>(1 / std::sqrt(correction2))};
}

/// Copies of both maps, made once for each device.
const DynamicMap* maps_on(c10::Device device) {
  static std::mutex mutex;
  static auto* const copies = new std::map<c10::DeviceIndex, at::Tensor>;  // Which live as long as the device.
  const std::lock_guard lock(mutex);
  auto& copy = (*copies)[device.index()];
  if (!copy.defined()) {
    constexpr auto kBytes = static_cast<std::int64_t>(sizeof(DynamicMap));
    const auto here = at::empty({2, kBytes}, at::kByte);
    std::memcpy(here[0].mutable_data_ptr(), &first_map(), sizeof(DynamicMap));
    std::memcpy(here[1].mutable_data_ptr(), &second_map(), sizeof(DynamicMap));
    copy = here.to(device);
  }
  return static_cast<const DynamicMap*>(copy.const_data_ptr());
}

void step_on_device(const QuantizedPiece& piece, const BlockAdamW& coefficients) {
  const auto device = piece.value.device();
  const auto* const maps = maps_on(device);
  const c10::DeviceGuard guard(device);
  const DeviceAdamW8bit step{
      .values = piece.value.mutable_data_ptr(),
      .gradients = piece.gradient.const_data_ptr(),
      .dtype = piece.value.scalar_type(),
      .gradient_dtype = piece.gradient.scalar_type(),
      .numel = piece.value.numel(),
      .first = {.map = maps, .codes = piece.state[0].mutable_data_ptr<std::uint8_t>(), .largest = piece.state[1].mutable_data_ptr<float>()},
      .second = {.map = maps + 1,
                 .codes = piece.state[2].mutable_data_ptr<std::uint8_t>(),
                 .largest = piece.state[3].mutable_data_ptr<float>()},
      .adamw = coefficients};
  device_adamw_8bit().of(device.type())(step, c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

}  // namespace

DeviceFunctions<LaunchAdamW8bit>& device_adamw_8bit() {
  static DeviceFunctions<LaunchAdamW8bit> functions;
  return functions;
}

bool steps_adamw_8bit_on(c10::DeviceType type) { return type == c10::DeviceType::CPU || device_adamw_8bit().of(type) != nullptr; }

void step_adamw_8bit(const QuantizedPiece& given, const AdamStep& step, std::int64_t steps) {
  const auto coefficients = coefficients_of(step, steps);
  const auto is_narrow = [](at::ScalarType dtype) { return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf; };
  auto piece = given;
  if (!is_narrow(piece.value.scalar_type()))
    throw Error(std::string("internal: 8-bit state of values of ") + c10::toString(piece.value.scalar_type()));
  if (!is_narrow(piece.gradient.scalar_type())) piece.gradient = piece.gradient.to(at::kFloat);
  for (const auto& state : piece.state) {
    if (state.device() == piece.value.device()) continue;
    throw Error("AdamW8bit: a parameter is on " + piece.value.device().str() + ", and its state on " + state.device().str() +
                "; load the state again");
  }
  if (!piece.value.is_cpu()) return step_on_device(piece, coefficients);
  const auto load_gradient = load_of(piece.gradient.scalar_type());
  const auto load_value = load_of(piece.value.scalar_type());
  const auto store_value = store_of(piece.value.scalar_type());
  const auto* gradients = piece.gradient.const_data_ptr();
  auto* values = piece.value.mutable_data_ptr();
  auto* first_codes = piece.state[0].mutable_data_ptr<std::uint8_t>();
  auto* first_largest = piece.state[1].mutable_data_ptr<float>();
  auto* second_codes = piece.state[2].mutable_data_ptr<std::uint8_t>();
  auto* second_largest = piece.state[3].mutable_data_ptr<float>();
  const auto numel = piece.value.numel();
  constexpr std::int64_t kBlocksPerTask = 64;
  parallel_for((numel + kBlock - 1) / kBlock, kBlocksPerTask, [&](std::int64_t begin, std::int64_t end) {
    Block gradient{};
    Block value{};
    for (std::int64_t b = begin; b < end; ++b) {
      const auto at = b * kBlock;
      const auto length = std::min(kBlock, numel - at);
      load_gradient(gradients, at, length, gradient);
      load_value(values, at, length, value);
      update_block(coefficients, gradient, value, {&first_map(), first_codes + at, first_largest + b},
                   {&second_map(), second_codes + at, second_largest + b}, length);
      store_value(values, at, length, value);
    }
  });
}

}  // namespace fsdp::optim
