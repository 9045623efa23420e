#include "fsdp/adamw_8bit.h"

#include <ATen/Parallel.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "fsdp/error.h"
#include "optim/block_adamw.h"
#include "optim/dynamic_map.h"
#include "optim/parameterwise.h"

namespace fsdp {
namespace {

using optim::Block;
using optim::DynamicMap;
using optim::ParameterPiece;
using optim::require;

constexpr std::int64_t kBlock = AdamW8bit::kBlock;
static_assert(kBlock == optim::kBlock);

const DynamicMap& first_map() {
  static const DynamicMap map(/*is_signed=*/true);
  return map;
}
const DynamicMap& second_map() {
  static const DynamicMap map(/*is_signed=*/false);
  return map;
}

bool is_quantized(const AdamW8bitOptions& options, const engine::Unit& unit, std::size_t parameter) {
  const auto dtype = unit.parameters[parameter].dtype;
  return unit.parameters[parameter].trainable && unit.layout.placements()[parameter].numel >= options.min_8bit_size &&
         (dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf);
}

void refuse_cut_blocks(const AdamW8bitOptions& options, const engine::Engine& engine) {
  for (const auto& unit : engine.units()) {
    for (std::size_t i = 0; i < unit->parameters.size(); ++i) {
      if (!is_quantized(options, *unit, i)) continue;
      const auto name = "AdamW8bit: parameter '" + unit->parameters[i].name + "' of unit '" + unit->name + "' ";
      require(engine.device().is_cpu() || unit->offloaded(),
              name + "is on " + engine.device().str() + ", but 8-bit state is for the CPU only; use AdamW, or Offload::kAll");
      require(optim::is_cut_between_blocks(*unit, i, kBlock),
              name + "is cut within blocks of " + std::to_string(kBlock) +
                  " elements, each of which has one scale; call fully_shard with .granularity = Granularity::blocks(" +
                  std::to_string(kBlock) + ") for it");
    }
  }
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

optim::BlockAdamW coefficients_of(const AdamW8bitOptions& options, const optim::Group& group, double lr, std::int64_t step) {
  const auto [beta1, beta2] = options.betas;
  const double correction1 = 1 - std::pow(beta1, static_cast<double>(step));
  const double correction2 = 1 - std::pow(beta2, static_cast<double>(step));
  return {.beta1 = static_cast<float>(beta1),
          .beta2 = static_cast<float>(beta2),
          .eps = static_cast<float>(options.eps),
          .decay = static_cast<float>(1 - lr * group.weight_decay),
          .step_size = static_cast<float>(lr / correction1),
          .second_scale = static_cast<float>(1 / std::sqrt(correction2))};
}

std::vector<at::Tensor> make_state(const ParameterPiece& piece, optim::StateMemory& memory) {
  const auto numel = piece.value.numel();
  const auto blocks = (numel + kBlock - 1) / kBlock;
  // Zero, whatever the codes: all largest magnitudes are.
  const auto& unit = *piece.unit;
  return {memory.zeros(unit, numel, at::kByte), memory.zeros(unit, blocks, at::kFloat), memory.zeros(unit, numel, at::kByte),
          memory.zeros(unit, blocks, at::kFloat)};
}

void update(const AdamW8bitOptions& options, const optim::Group& group, double lr, ParameterPiece& piece) {
  const auto coefficients = coefficients_of(options, group, lr, piece.steps);
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
  at::parallel_for(0, (numel + kBlock - 1) / kBlock, kBlocksPerTask, [&](std::int64_t begin, std::int64_t end) {
    Block gradient{};
    Block value{};
    for (std::int64_t b = begin; b < end; ++b) {
      const auto at = b * kBlock;
      const auto length = std::min(kBlock, numel - at);
      load_gradient(gradients, at, length, gradient);
      load_value(values, at, length, value);
      optim::update_block(coefficients, gradient, value, {&first_map(), first_codes + at, first_largest + b},
                          {&second_map(), second_codes + at, second_largest + b}, length);
      store_value(values, at, length, value);
    }
  });
}

}  // namespace

AdamW8bit::AdamW8bit(torch::nn::Module& module, AdamW8bitOptions options, std::vector<ParamGroup> groups)
    : Optimizer(std::make_unique<State>(module)) {
  const auto& engine = state_->engine;
  refuse_cut_blocks(options, *engine);
  const auto quantized = [options](const engine::Unit& unit, std::size_t i) { return is_quantized(options, unit, i); };
  const AdamWOptions in_full{.lr = options.lr, .betas = options.betas, .eps = options.eps, .weight_decay = options.weight_decay};
  auto rest = optim::adamw(engine, in_full, groups, [quantized](const engine::Unit& unit, std::size_t i) { return !quantized(unit, i); });
  state_->parts.push_back(std::make_unique<optim::Parameterwise>(
      engine, optim::Groups({options.lr, options.weight_decay}, groups), quantized,
      // bitsandbytes' names: codes, and the largest magnitude of each block of them.
      std::vector<optim::StateKind>{{"state1"}, {"absmax1", kBlock}, {"state2"}, {"absmax2", kBlock}},
      optim::adam_settings(options.betas, options.eps), make_state,
      [options](const optim::Group& group, double lr, ParameterPiece& piece) { update(options, group, lr, piece); }));
  state_->parts.push_back(std::move(rest));
}

}  // namespace fsdp
