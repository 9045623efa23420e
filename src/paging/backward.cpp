#include "paging/backward.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include "paging/paged_model.h"
#include "paging/warnings.h"

namespace fsdp::paging {

void watch_backward(const std::shared_ptr<engine::Engine>& engine) {
  auto& gate = PagedModel::of(*engine).gate;
  if (torch::autograd::get_current_graph_task_id() == -1) {
    gate.alone([&] { engine->recover(); });
    return;
  }
  if (engine->in_backward()) return;
  // The callback, and with it the token, lives exactly as long as the backward: autograd drops it unrun if the backward throws.
  const auto alive = std::make_shared<char>();
  const auto of = is_for_all_leaves() ? engine::BackwardOf::kAllLeaves : engine::BackwardOf::kChosenTensors;
  bool begun = false;
  gate.alone([&] { begun = engine->begin_backward(alive, of); });
  if (!begun) return;
  torch::autograd::Engine::get_default_engine().queue_callback([engine, alive, of] {
    auto& model = PagedModel::of(*engine);
    model.gate.alone([&] { engine->end_backward(); });
    model.validated = false;
    if (of == engine::BackwardOf::kAllLeaves) warn_of_unused(*engine);
  });
}

bool is_for_all_leaves() {
  const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
  return chosen != nullptr && chosen->empty();
}

engine::Phase current_phase() {
  const bool in_backward = torch::autograd::get_current_graph_task_id() != -1;
  return in_backward && !at::GradMode::is_enabled() ? engine::Phase::kBackward : engine::Phase::kForward;
}

}  // namespace fsdp::paging
