#include "fsdp/adamw_8bit.h"

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <string>
#include <utility>

#include "fsdp/error.h"
#include "optim/adamw_8bit_step.h"
#include "optim/parameterwise.h"

namespace fsdp {
namespace {

using optim::ParameterPiece;
using optim::require;

constexpr std::int64_t kBlock = AdamW8bit::kBlock;

bool is_quantized(const AdamW8bitOptions& options, const engine::Unit& unit, std::size_t parameter) {
  const auto dtype = unit.formats[unit.layout.positions()[parameter].sub_buffer].main;
  return unit.parameters[parameter].trainable && unit.layout.positions()[parameter].numel >= options.min_8bit_size &&
         (dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf);
}

void refuse_cut_blocks(const AdamW8bitOptions& options, const engine::Engine& engine) {
  for (const auto& unit : engine.units()) {
    for (std::size_t i = 0; i < unit->parameters.size(); ++i) {
      if (!is_quantized(options, *unit, i)) continue;
      const auto name = "AdamW8bit: parameter '" + unit->parameters[i].name + "' of unit '" + unit->name + "' ";
      require(optim::steps_adamw_8bit_on(engine.options().device().type()) || unit->offloaded(),
              name + "is on " + engine.options().device().str() +
                  ", for which this build of libfsdp has no kernel of it; use AdamW, or Offload::kAll");
      require(optim::is_cut_between_blocks(*unit, i, kBlock),
              name + "is cut within blocks of " + std::to_string(kBlock) +
                  " elements, each of which has one scale; call fully_shard with .granularity = Granularity::blocks(" +
                  std::to_string(kBlock) + ") for it");
    }
  }
}

std::vector<at::Tensor> make_state(const ParameterPiece& piece, optim::StateMemory& memory) {
  const auto numel = piece.value.numel();
  const auto blocks = (numel + kBlock - 1) / kBlock;
  // The state is zero, whatever the codes are, because all largest magnitudes are zero.
  const auto& unit = *piece.unit;
  return {memory.zeros(unit, numel, at::kByte), memory.zeros(unit, blocks, at::kFloat), memory.zeros(unit, numel, at::kByte),
          memory.zeros(unit, blocks, at::kFloat)};
}

}  // namespace

AdamW8bit::AdamW8bit(torch::nn::Module& module, AdamW8bitOptions options, std::vector<ParamGroup> groups)
    : Optimizer(std::make_unique<State>(module)) {
  const auto& engine = state_->engine;
  refuse_cut_blocks(options, *engine);
  const auto quantized = [options](const engine::Unit& unit, std::size_t i) { return is_quantized(options, unit, i); };
  const AdamWOptions in_full{.lr = options.lr, .betas = options.betas, .eps = options.eps, .weight_decay = options.weight_decay};
  // Each group lists this setting, as those of libfsdp.optim.AdamW8bit do.
  const optim::Settings size = {{"min_8bit_size", options.min_8bit_size}};
  auto rest = optim::adamw(
      engine, in_full, groups, [quantized](const engine::Unit& unit, std::size_t i) { return !quantized(unit, i); }, size);
  state_->algorithms.push_back(std::make_unique<optim::Parameterwise>(
      engine, optim::Groups(optim::adam_defaults(in_full), groups, optim::adam_rules(size)), quantized,
      // bitsandbytes' names: codes, and the largest magnitude of each block of them.
      std::vector<optim::StateKind>{{"state1"}, {"absmax1", kBlock}, {"state2"}, {"absmax2", kBlock}}, make_state,
      [](const optim::GroupSettings& group, double lr, ParameterPiece& piece) {
        const auto [beta1, beta2] = group.betas;
        optim::step_adamw_8bit({piece.value, piece.gradient, piece.state},
                               {.lr = lr, .beta1 = beta1, .beta2 = beta2, .weight_decay = group.weight_decay, .eps = group.eps},
                               piece.steps);
      }));
  state_->algorithms.push_back(std::move(rest));
}

}  // namespace fsdp
