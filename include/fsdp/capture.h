#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <memory>

namespace fsdp {

/// Options of capture().
struct CaptureOptions {
  /// This many steps run before the one that is captured; at least 1. After the third step, buffers have their final addresses and sizes.
  int warm_up = 3;
};

/// A training step that was captured as a graph: see capture().
class CapturedStep {
 public:
  CapturedStep(CapturedStep&&) noexcept;  ///< Moves the step. The other one can then only be destroyed.
  CapturedStep& operator=(CapturedStep&&) noexcept;
  /// Frees the graph and its memory. Tensors that the step has assigned (a loss) must not be used any more.
  ~CapturedStep();

  /// Launches the step on the device's current stream, with the current values of its inputs. The host neither waits nor computes anything,
  /// so ranks do not compare their calls: all of them have to call it equally often. Optimizers count the step, and gathered copies of
  /// parameters are stale after it, as after any step. It throws Error, and does nothing, if a learning rate differs from the captured one,
  /// or if the model is partly loaded.
  void replay();

 private:
  struct State;
  explicit CapturedStep(std::unique_ptr<State> state);
  friend CapturedStep capture(torch::nn::Module& module, std::function<void()> step, CaptureOptions options);
  std::unique_ptr<State> state_;
};

/// Captures forward, backward and update of `module`, which fully_shard has sharded, as one graph: a CUDA graph on a GPU. `step` is first
/// called for the warm-up, each time a training step, and once more for the capture, which computes nothing. It must do the same each time,
/// on tensors whose addresses do not change, and read no value on the host:
///
///     auto x = at::empty({8, 128}, device), loss = at::empty({}, device);
///     auto step = fsdp::capture(*model, [&] {
///       auto result = model->forward(x).square().mean();
///       result.backward();
///       optimizer.step();
///       optimizer.zero_grad();
///       loss.copy_(result.detach());
///     });
///     for (auto& batch : loader) {
///       x.copy_(batch);
///       step.replay();
///     }
///
/// The step may contain AdamW and SGD, clip_grad_norm_ and accumulation. These are an Error: other optimizers (they count on the host),
/// clip_grad_norm, GradScaler, report_nan_in_param_grad, offload. `step` is kept as long as the result. The call is collective: before the
/// capture, the ranks compare their calls so far. It throws Error if the device has no graphs, or if this build does not support them (CUDA
/// needs FSDP_CUDA, or a torch with at::accelerator::Graph). Exceptions of `step` are rethrown; the model then has no gradients, and can be
/// trained without a graph.
CapturedStep capture(torch::nn::Module& module, std::function<void()> step, CaptureOptions options = {});

}  // namespace fsdp
