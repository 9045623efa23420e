#include "optim/adamw_8bit_step.h"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>

#include "base/parallel_for.h"
#include "fsdp/adamw_8bit.h"
#include "optim/block_adamw.h"
#include "optim/dynamic_map.h"

namespace fsdp::optim {
namespace {

static_assert(AdamW8bit::kBlock == kBlock);

const DynamicMap& first_map() {
  static const DynamicMap map(/*is_signed=*/true);
  return map;
}
const DynamicMap& second_map() {
  static const DynamicMap map(/*is_signed=*/false);
  return map;
}

// Parameters and gradients of any dtype, by blocks.
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

}  // namespace

void step_adamw_8bit(const QuantizedPart& part, const AdamStep& step, std::int64_t steps) {
  const auto coefficients = coefficients_of(step, steps);
  const auto load_gradient = load_of(part.gradient.scalar_type());
  const auto load_value = load_of(part.value.scalar_type());
  const auto store_value = store_of(part.value.scalar_type());
  const auto* gradients = part.gradient.const_data_ptr();
  auto* values = part.value.mutable_data_ptr();
  auto* first_codes = part.state[0].mutable_data_ptr<std::uint8_t>();
  auto* first_largest = part.state[1].mutable_data_ptr<float>();
  auto* second_codes = part.state[2].mutable_data_ptr<std::uint8_t>();
  auto* second_largest = part.state[3].mutable_data_ptr<float>();
  const auto numel = part.value.numel();
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
