#include "fsdp/gradient_norm.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/on_host.h"
#include "base/stream_capture.h"
#include "engine/engine.h"
#include "fsdp/error.h"
#include "fsdp/fsdp_module.h"
#include "optim/norm.h"
#include "optim/shard_optimizer.h"

namespace fsdp {
namespace {

using optim::Norm;

/// Returns the norms of the parameters that `counted` accepts, from their places in the sub-buffers that `buffers_of` returns. Parameters
/// for which it returns none are left out.
template <typename Counted, typename BuffersOf>
std::vector<std::pair<std::string, double>> norms_by_name(const engine::Engine& engine, const Norm& norm, const char* operation,
                                                          const Counted& counted, const BuffersOf& buffers_of) {
  std::vector<at::Tensor> mine;
  struct Entry {
    std::size_t position;
    std::string name;
    bool shown;
    double norm;
  };
  std::vector<Entry> norms;
  for (const auto& unit : engine.units()) {
    for (std::size_t i = 0; i < unit->parameters.size(); ++i) {
      const auto& parameter = unit->parameters[i];
      if (!counted(parameter)) continue;
      const auto* buffers = buffers_of(*unit, i);
      const auto slice = unit->slice(i, unit->own_pieces());
      // Other ranks may have other experts, with or without gradients, so all ranks send the same number of values.
      std::vector<at::Tensor> piece;
      if (buffers != nullptr && engine.options().speaks_for(parameter)) {
        piece.push_back((*buffers)[slice.sub_buffer].narrow(0, slice.offset, slice.numel));
      }
      mine.push_back(norm.of_pieces(piece));
      norms.push_back({parameter.position, parameter.name, buffers != nullptr, 0});
    }
  }
  const auto all = optim::exchange(engine, on_host(std::move(mine), at::kDouble), operation);
  const auto* values = all.template const_data_ptr<double>();
  for (std::int64_t rank = 0; rank < all.size(0); ++rank) {
    for (auto& entry : norms) entry.norm = norm.merge(entry.norm, *values++);
  }
  std::sort(norms.begin(), norms.end(), [](const auto& a, const auto& b) { return a.position < b.position; });
  std::vector<std::pair<std::string, double>> result;
  for (auto& entry : norms) {
    if (entry.shown) result.emplace_back(std::move(entry.name), norm.finish(entry.norm));
  }
  return result;
}

/// Returns the gradients of this rank's own pieces only, even if other ranks hold these pieces, too: every element counts once, in the same
/// sums for every strategy.
std::vector<at::Tensor> own_gradients(engine::Engine& engine, double max_norm, const std::string& function) {
  if (!(max_norm > 0)) throw Error(function + ": max_norm must be positive, got " + std::to_string(max_norm));
  engine.main().check_parameters();
  engine.main().finish_gradient_sync();
  std::vector<at::Tensor> mine;
  for (const auto& unit : engine.units()) {
    if (!unit->main_gradient.valid) continue;
    if (!engine.options().tensor_parallel.defined()) {
      for (std::size_t k = 0; k < unit->main_gradient.parts.size(); ++k) {
        mine.push_back(unit->main_region(unit->main_gradient.parts[k], unit->own_pieces()));
      }
      continue;
    }
    for (std::size_t i = 0; i < unit->parameters.size(); ++i) {
      if (!unit->parameters[i].trainable || !engine.options().speaks_for(unit->parameters[i])) continue;
      const auto slice = unit->slice(i, unit->own_pieces());
      mine.push_back(unit->main_gradient.parts[slice.sub_buffer].narrow(0, slice.offset, slice.numel));
    }
  }
  return mine;
}

/// The norm of what all ranks have, merged in their order.
double total_on_host(const engine::Engine& engine, const Norm& norm, const at::Tensor& mine) {
  const auto all = optim::exchange(engine, mine.view({1}), "gradient norm");
  double merged = 0;
  for (std::int64_t rank = 0; rank < all.size(0); ++rank) merged = norm.merge(merged, all.const_data_ptr<double>()[rank]);
  return norm.finish(merged);
}

/// Computes the total on the device, without a wait of the host.
at::Tensor total_on_device(const engine::Engine& engine, const Norm& norm, const at::Tensor& mine) {
  const auto& communicators = engine.units().front()->communicators;
  const auto& pieces = engine.options().tensor_parallel;
  at::Tensor all = mine.view({1});
  for (auto* row : {communicators.outer.get(), communicators.gather.get(),
                    pieces.defined() ? pieces.communicator(pieces.dims().front().name).get() : nullptr}) {
    if (row == nullptr || row->size() == 1) continue;
    auto every = at::empty({row->size() * all.numel()}, all.options());
    const comm::GatherPart part{.full = every, .shard = all};
    row->all_gather({&part, 1}, {.operation = "gradient norm", .unit = "(all)"})->wait();
    all = every;
  }
  return norm.finish(norm.merge(all));
}

/// By a factor of the device.
void scale(std::vector<at::Tensor>& gradients, const at::Tensor& factor) {
  for (auto& gradient : gradients) {
    if (gradient.numel() == 0) continue;
    if (gradient.scalar_type() == at::kFloat || gradient.scalar_type() == at::kDouble) {
      gradient.mul_(factor.to(gradient.scalar_type()));
    } else {
      gradient.copy_(gradient.to(at::kFloat).mul_(factor.to(at::kFloat)));
    }
  }
}

}  // namespace

at::Tensor clip_grad_norm_(torch::nn::Module& module, double max_norm, ClipGradNormOptions options) {
  const auto engine = handle(module).engine();
  const Norm norm(options.norm_type, "clip_grad_norm_");
  const at::NoGradGuard no_grad;
  const bool has_offload = std::any_of(engine->units().begin(), engine->units().end(), [](const auto& unit) { return unit->offloaded(); });
  if (engine->options().device().is_cpu() || has_offload || options.error_if_nonfinite) {
    refuse_in_capture(engine->options().device(), "clip_grad_norm_", "do without error_if_nonfinite and offload");
    const auto total = handle(module).clip_grad_norm(max_norm, options);
    return at::full({}, total, at::device(engine->options().device()).dtype(at::kDouble));
  }
  auto mine = norm.of_pieces(own_gradients(*engine, max_norm, "clip_grad_norm_"));
  if (mine.is_cpu()) mine = at::zeros({}, at::device(engine->options().device()).dtype(at::kDouble));  // this rank has none
  const auto total = total_on_device(*engine, norm, mine);
  const auto factor = at::clamp_max(max_norm / (total + 1e-6), 1.0);
  for (const auto& unit : engine->units()) {
    if (unit->main_gradient.valid) scale(unit->main_gradient.parts, factor);
  }
  return total;
}

double clip_grad_norm(torch::nn::Module& module, double max_norm, ClipGradNormOptions options) {
  return handle(module).clip_grad_norm(max_norm, options);
}

double FSDPModule::clip_grad_norm(double max_norm) { return clip_grad_norm(max_norm, ClipGradNormOptions{}); }

double FSDPModule::clip_grad_norm(double max_norm, const ClipGradNormOptions& options) {
  refuse_in_capture(engine_->options().device(), "clip_grad_norm", "use clip_grad_norm_, whose norm stays on the device");
  const Norm norm(options.norm_type, "clip_grad_norm");
  const at::NoGradGuard no_grad;
  const auto mine = own_gradients(*engine_, max_norm, "clip_grad_norm");
  const double total = total_on_host(*engine_, norm, norm.of_pieces(mine).cpu());
  if (options.error_if_nonfinite && !std::isfinite(total)) {
    throw Error("clip_grad_norm: the gradients' norm is " + std::to_string(total) + " on all ranks; gradients are unchanged");
  }
  const double factor = max_norm / (total + 1e-6);
  if (factor < 1 || !std::isfinite(total)) {
    for (const auto& unit : engine_->units()) {
      if (unit->main_gradient.valid) at::_foreach_mul_(unit->main_gradient.parts, factor);
    }
  }
  return total;
}

std::vector<std::pair<std::string, double>> gradient_norms(torch::nn::Module& module, double norm_type) {
  const Norm norm(norm_type, "gradient_norms");
  const at::NoGradGuard no_grad;
  const auto engine = handle(module).engine();
  engine->main().check_parameters();
  engine->main().finish_gradient_sync();
  return norms_by_name(
      *engine, norm, "gradient norms", [](const auto& parameter) { return parameter.trainable; },
      [](const engine::Unit& unit, std::size_t i) -> const std::vector<at::Tensor>* {
        return unit.parameters[i].has_gradient ? &unit.main_gradient.parts : nullptr;
      });
}

std::vector<std::pair<std::string, double>> parameter_norms(torch::nn::Module& module, double norm_type) {
  const Norm norm(norm_type, "parameter_norms");
  const at::NoGradGuard no_grad;
  const auto engine = handle(module).engine();
  engine->main().flush_writes();
  return norms_by_name(
      *engine, norm, "parameter norms", [](const auto&) { return true; },
      [](const engine::Unit& unit, std::size_t) { return &unit.main.parts; });
}

}  // namespace fsdp
