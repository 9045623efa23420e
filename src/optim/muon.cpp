#include "fsdp/muon.h"

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <utility>

#include "fsdp/error.h"
#include "optim/muon_step.h"
#include "optim/parameterwise.h"

namespace fsdp {
namespace {

using optim::ParameterPiece;
using optim::require;

void validate(const MuonOptions& options) {
  require(options.ns_steps >= 1 && options.ns_steps < 100, "Muon: ns_steps must lie in [1, 100)");
  require(!options.ns_dtype || c10::isFloatingType(*options.ns_dtype), "Muon: ns_dtype must be a real floating-point dtype");
}

bool is_muons(const MuonOptions& options, const engine::Unit& unit, std::size_t parameter) {
  const auto& info = unit.parameters[parameter];
  if (!info.trainable || info.shape.size() < 2) return false;
  if (options.matrices) return options.matrices(info.name);
  return unit.layout.parameters()[parameter].granularity.kind == Granularity::Kind::kWhole;
}

void refuse_cut_matrices(const MuonOptions& options, const engine::Engine& engine) {
  for (const auto& unit : engine.units()) {
    for (std::size_t i = 0; i < unit->parameters.size(); ++i) {
      if (!is_muons(options, *unit, i)) continue;
      const auto& parameter = unit->parameters[i];
      const auto name = "Muon: parameter '" + parameter.name + "' of unit '" + unit->name + "' ";
      require(parameter.shape == parameter.global_shape,
              name +
                  "is a tensor-parallel piece of a matrix, but a matrix is updated as a whole; leave the parameter to AdamW by "
                  "MuonOptions::matrices");
      require(optim::is_whole(*unit, i),
              name +
                  "is cut over several ranks, but a matrix is updated as a whole; call fully_shard with .granularity = "
                  "fsdp::whole_matrices(), or leave the parameter to AdamW by MuonOptions::matrices");
    }
  }
}

void update(MuonOptions options, const optim::GroupSettings& group, double lr, ParameterPiece& piece) {
  options.momentum = group.momentum;
  options.nesterov = group.nesterov;
  options.eps = group.eps;
  const std::vector<std::int64_t> matrix = {piece.shape().front(), piece.value.numel() / piece.shape().front()};
  auto value = piece.value.view(matrix);
  const auto gradient = piece.gradient.view(matrix);
  auto momentum = piece.state.front().view(matrix);
  const auto direction = optim::muon_direction(momentum, gradient, options);
  optim::muon_update(value, optim::orthogonalized(direction, options), lr, group.weight_decay, options.adjust_lr, matrix[0], matrix[1]);
}

}  // namespace

Muon::Muon(torch::nn::Module& module, MuonOptions options, std::vector<ParamGroup> groups) : Optimizer(std::make_unique<State>(module)) {
  validate(options);
  const auto& engine = state_->engine;
  refuse_cut_matrices(options, *engine);
  const auto is_matrix = [options](const engine::Unit& unit, std::size_t i) { return is_muons(options, unit, i); };
  const auto describe = [options](const optim::GroupSettings& group) {
    return optim::Settings{{"momentum", group.momentum},
                           {"nesterov", group.nesterov},
                           {"ns_coefficients", std::vector<double>(options.ns_coefficients.begin(), options.ns_coefficients.end())},
                           {"eps", group.eps},
                           {"ns_steps", std::int64_t{options.ns_steps}},
                           {"adjust_lr_fn", std::string(options.adjust_lr == AdjustLR::kOriginal ? "original" : "match_rms_adamw")}};
  };
  const auto validate_group = [](const optim::GroupSettings& group) {
    require(group.momentum >= 0 && group.momentum < 1, "Muon: momentum must lie in [0, 1)");
    require(group.eps > 0, "Muon: eps must be positive");
  };
  const optim::GroupSettings defaults{.lr = {options.lr},
                                      .weight_decay = options.weight_decay,
                                      .eps = options.eps,
                                      .momentum = options.momentum,
                                      .nesterov = options.nesterov};
  state_->algorithms_differ = true;
  state_->algorithms.push_back(std::make_unique<optim::Parameterwise>(
      engine, optim::Groups(defaults, groups, {describe, validate_group}), is_matrix, std::vector<optim::StateKind>{{"momentum_buffer"}},
      [](const ParameterPiece& piece, optim::StateMemory& memory) {
        return std::vector<at::Tensor>{memory.zeros(*piece.unit, piece.value.numel(), piece.value.scalar_type())};
      },
      [options](const optim::GroupSettings& group, double lr, ParameterPiece& piece) { update(options, group, lr, piece); }));
  state_->algorithms.push_back(
      optim::adamw(engine, options.adamw, groups, [is_matrix](const engine::Unit& unit, std::size_t i) { return !is_matrix(unit, i); }));
}

std::function<Granularity(const std::string& name, const at::Tensor& parameter)> whole_matrices(
    std::function<bool(const std::string& name)> matches) {
  return [matches = std::move(matches)](const std::string& name, const at::Tensor& parameter) {
    return parameter.dim() >= 2 && (!matches || matches(name)) ? Granularity::whole() : Granularity::element();
  };
}

}  // namespace fsdp
