#include "fsdp/grad_scaler.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cmath>
#include <cstring>
#include <string>
#include <utility>

#include "base/on_host.h"
#include "base/stream_capture.h"
#include "engine/engine.h"
#include "fsdp/error.h"
#include "fsdp/fsdp_module.h"
#include "optim/shard_optimizer.h"

namespace fsdp {
namespace {

void validate(const GradScalerState& state) {
  const auto require = [](bool holds, const char* what, double value) {
    if (!holds) throw Error(std::string("GradScaler: ") + what + ", got " + std::to_string(value));
  };
  require(state.scale > 0 && std::isfinite(state.scale), "the scale must be positive and finite", state.scale);
  require(state.growth_factor > 1, "growth_factor must be greater than 1", state.growth_factor);
  require(state.backoff_factor > 0 && state.backoff_factor < 1, "backoff_factor must lie between 0 and 1", state.backoff_factor);
  require(state.growth_interval >= 1, "growth_interval must be at least 1", static_cast<double>(state.growth_interval));
}

/// Checks values in host memory: they are finite if each exponent has a bit that is zero. `Bits` is the unsigned integer type of the
/// format's size, and `exponent` the mask of its exponent.
template <typename Bits>
bool all_finite(const at::Tensor& tensor, Bits exponent) {
  const auto* data = static_cast<const Bits*>(tensor.const_data_ptr());
  unsigned found = 0;  // no early exit: the loop is then one of vector registers
  for (std::int64_t i = 0; i < tensor.numel(); ++i) found |= static_cast<unsigned>((data[i] & exponent) == exponent);
  return found == 0;
}

bool all_finite_on_host(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return all_finite<std::uint32_t>(tensor, 0x7F800000U);
    case at::kBFloat16:
      return all_finite<std::uint16_t>(tensor, 0x7F80U);
    case at::kHalf:
      return all_finite<std::uint16_t>(tensor, 0x7C00U);
    default:
      return tensor.isfinite().all().item<bool>();
  }
}

/// The host waits once for all tensors on a device.
bool all_finite(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> on_device;
  for (const auto& tensor : tensors) {
    if (!tensor.is_cpu()) {
      on_device.push_back(tensor.isfinite().all());
    } else if (!all_finite_on_host(tensor)) {
      return false;
    }
  }
  return on_host(std::move(on_device), at::kBool).all().item<bool>();
}

}  // namespace

GradScaler::GradScaler(GradScalerOptions options)
    : state_{.scale = options.init_scale,
             .growth_factor = options.growth_factor,
             .backoff_factor = options.backoff_factor,
             .growth_interval = options.growth_interval,
             .growth_tracker = 0},
      enabled_(options.enabled) {
  validate(state_);
}

at::Tensor GradScaler::scale(const at::Tensor& loss) const {
  // The scale is a tensor, so that a half-precision loss is widened when it is multiplied, as in torch, and does not overflow.
  return enabled_ ? loss * at::scalar_tensor(state_.scale, loss.options().dtype(at::kFloat).requires_grad(false)) : loss;
}

GradScaler::Model* GradScaler::find(const std::shared_ptr<engine::Engine>& engine) {
  for (auto& model : models_) {
    if (model.engine.lock() == engine) return &model;
  }
  return nullptr;
}

// Nothing is written before all ranks have agreed. If gradients are replicated, every rank checks its own piece only, and scales all of
// them.
GradScaler::Model& GradScaler::unscale(const std::shared_ptr<engine::Engine>& engine) {
  refuse_in_capture(engine->options().device(), "GradScaler",
                    "capture forward and backward alone, and unscale and step behind each replay");
  const at::NoGradGuard no_grad;
  engine->main().finish_gradient_sync();
  std::vector<at::Tensor> pieces;
  for (const auto& unit : engine->units()) {
    if (!unit->main_gradient.valid) continue;
    for (std::size_t k = 0; k < unit->main_gradient.parts.size(); ++k) {
      pieces.push_back(unit->main_region(unit->main_gradient.parts[k], unit->own_pieces()));
    }
  }
  const bool finite = all_finite(pieces);
  // The scale, negative where a gradient is not finite.
  const auto all = optim::exchange(*engine, at::full({1}, finite ? state_.scale : -state_.scale, at::kDouble), "infinite gradients");
  const auto scales = all.abs();
  if (scales.ne(state_.scale).any().item<bool>()) {
    throw Error(std::string("GradScaler: the ranks have scaled their losses by other numbers, from ") +
                std::to_string(scales.min().item<double>()) + " to " + std::to_string(scales.max().item<double>()) + "; this one by " +
                std::to_string(state_.scale) + ". Give all ranks the same options, and the same state when training resumes.");
  }
  const bool found_inf = all.lt(0).any().item<bool>();
  if (!found_inf) {
    for (const auto& unit : engine->units()) {
      if (!unit->main_gradient.valid) continue;
      for (auto& gradient : unit->main_gradient.parts) gradient.mul_(1 / state_.scale);
    }
  }
  models_.push_back({.engine = engine, .found_inf = found_inf});
  return models_.back();
}

void GradScaler::unscale_(torch::nn::Module& module) {
  if (!enabled_) return;
  const auto engine = handle(module).engine();
  if (const auto* model = find(engine)) {
    throw Error(std::string("GradScaler::unscale_: ") + (model->stepped ? "is called after step()" : "is called twice") +
                "; call update() once per iteration, after all steps");
  }
  unscale(engine);
}

bool GradScaler::step(Optimizer& optimizer) {
  if (!enabled_) {
    optimizer.step();
    return true;
  }
  auto* model = find(optimizer.engine());
  if (model == nullptr) model = &unscale(optimizer.engine());
  if (model->stepped) throw Error("GradScaler::step: is called twice for a model; call update() once per iteration, after all steps");
  model->stepped = true;
  if (model->found_inf) return false;
  optimizer.step();
  return true;
}

void GradScaler::update() {
  if (!enabled_) return;
  if (models_.empty()) throw Error("GradScaler::update: no gradients were looked at since the last update; call step() before");
  bool found_inf = false;
  for (const auto& model : models_) found_inf = found_inf || model.found_inf;
  models_.clear();
  if (found_inf) {
    state_.scale *= state_.backoff_factor;
    state_.growth_tracker = 0;
  } else if (++state_.growth_tracker == state_.growth_interval) {
    const double grown = state_.scale * state_.growth_factor;
    // The scale stays a finite fp32 number, as torch's.
    if (std::isfinite(static_cast<float>(grown))) state_.scale = grown;
    state_.growth_tracker = 0;
  }
}

void GradScaler::update(double new_scale) {
  if (!enabled_) return;
  auto state = state_;
  state.scale = new_scale;
  validate(state);
  state_ = state;
  models_.clear();
}

void GradScaler::load_state_dict(const GradScalerState& state) {
  validate(state);
  state_ = state;
}

}  // namespace fsdp
