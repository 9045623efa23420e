#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "fsdp/optim.h"

namespace fsdp {

/// Defaults are torch.amp.GradScaler's.
struct GradScalerOptions {
  double init_scale = 65'536;  ///< The scale of the first step.
  double growth_factor = 2;  ///< The scale is multiplied by it after `growth_interval` steps in a row without an infinite or NaN gradient.
  double backoff_factor = 0.5;          ///< The scale is multiplied by it after a step with an infinite or NaN gradient.
  std::int64_t growth_interval = 2000;  ///< In steps.
  bool enabled = true;                  ///< False: all calls work as without a scaler.
};

/// The state of a GradScaler in a checkpoint.
struct GradScalerState {
  double scale = 0;                  ///< The current scale.
  double growth_factor = 0;          ///< As in the options.
  double backoff_factor = 0;         ///< As in the options.
  std::int64_t growth_interval = 0;  ///< As in the options.
  std::int64_t growth_tracker = 0;   ///< Steps without an infinite gradient since the scale last changed.
  bool operator==(const GradScalerState&) const = default;
};

/// Dynamic loss scaling for training in fp16. The loss is multiplied by a scale, so that small gradients do not become zero. Gradients are
/// divided by it before the optimizer sees them, and a step whose gradients have overflowed is skipped. This is torch.amp.GradScaler for
/// sharded models: the ranks agree on whether a gradient was infinite before any of them steps.
///
///     fsdp::GradScaler scaler;
///     scaler.scale(loss).backward();
///     scaler.unscale_(*model);  // only if gradients are read, or clipped, before the step
///     fsdp::clip_grad_norm(*model, 1.0);
///     scaler.step(optimizer);
///     scaler.update();
///     optimizer.zero_grad();
class GradScaler {
 public:
  /// Throws Error if the options have no meaning (a scale that is not positive, a growth factor of at most 1, a backoff factor outside of
  /// (0, 1), an interval below 1).
  explicit GradScaler(GradScalerOptions options = {});

  /// Returns the loss times the scale.
  at::Tensor scale(const at::Tensor& loss) const;
  /// Divides the module's gradients by the scale. If one is infinite or NaN on any rank, gradients stay as they are on all ranks. step()
  /// calls this if it was not called before. Collective: one exchange of a byte. Throws Error if it was called since the last update().
  void unscale_(torch::nn::Module& module);
  /// Calls optimizer.step(), unless a gradient was infinite or NaN on any rank. In that case parameters, optimizer state and gradients stay
  /// as they are. Returns whether it stepped, which is the same on every rank. Collective like unscale_(), if that has not been called.
  /// Throws Error if called twice for a model since the last update().
  bool step(Optimizer& optimizer);
  /// Grows or shrinks the scale, depending on whether the steps since the last call found infinite gradients. Call it once per iteration,
  /// after all steps. Throws Error if there was no step.
  void update();
  /// Sets the scale instead.
  void update(double new_scale);

  /// The current scale; 1 if disabled.
  double get_scale() const { return enabled_ ? state_.scale : 1; }
  bool is_enabled() const { return enabled_; }  ///< GradScalerOptions::enabled.

  /// For a checkpoint; see SaveOptions::grad_scaler.
  GradScalerState state_dict() const { return state_; }
  /// Restores a saved state. Throws Error in the same cases as the constructor.
  void load_state_dict(const GradScalerState& state);

 private:
  /// Where a model stands since the last update().
  struct Model {
    std::weak_ptr<engine::Engine> engine;
    bool found_inf = false;
    bool stepped = false;
  };
  Model* find(const std::shared_ptr<engine::Engine>& engine);
  Model& unscale(const std::shared_ptr<engine::Engine>& engine);

  GradScalerState state_;
  bool enabled_;
  std::vector<Model> models_;
};

}  // namespace fsdp
