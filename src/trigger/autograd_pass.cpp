#include "trigger/autograd_pass.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>

namespace fsdp::trigger {

bool inside_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

engine::Pass current_pass() { return inside_backward() && !at::GradMode::is_enabled() ? engine::Pass::kBackward : engine::Pass::kForward; }

bool is_for_all_leaves() {
  const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
  return chosen != nullptr && chosen->empty();
}

}  // namespace fsdp::trigger
