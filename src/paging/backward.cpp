#include "paging/backward.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

namespace fsdp::paging {

void watch_backward(const std::shared_ptr<engine::Engine>& engine) {
  if (torch::autograd::get_current_graph_task_id() == -1) {
    engine->recover();
    return;
  }
  if (engine->in_backward()) return;
  // The callback, and with it the token, lives exactly as long as the backward: autograd drops it unrun if the backward throws.
  const auto alive = std::make_shared<char>();
  const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
  const bool all_leaves = chosen == nullptr || chosen->empty();
  if (!engine->begin_backward(alive, all_leaves ? engine::BackwardOf::kAllLeaves : engine::BackwardOf::kChosenTensors)) return;
  torch::autograd::Engine::get_default_engine().queue_callback([engine, alive] { engine->end_backward(); });
}

engine::Phase current_phase() {
  const bool in_backward = torch::autograd::get_current_graph_task_id() != -1;
  return in_backward && !at::GradMode::is_enabled() ? engine::Phase::kBackward : engine::Phase::kForward;
}

}  // namespace fsdp::paging
