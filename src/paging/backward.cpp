#include "paging/backward.h"

#include <torch/csrc/autograd/engine.h>

#include "engine/autograd_phase.h"
#include "paging/paged_model.h"
#include "paging/warnings.h"

namespace fsdp::paging {

void watch_backward(const std::shared_ptr<engine::Engine>& engine) {
  auto& gate = PagedModel::of(*engine).gate;
  if (!engine::inside_backward()) {
    gate.alone([&] { engine->recover(); });
    return;
  }
  if (engine->in_backward()) return;
  // The callback, and with it the token, lives exactly as long as the backward: autograd drops it unrun if the backward throws.
  const auto alive = std::make_shared<char>();
  const auto of = engine::is_for_all_leaves() ? engine::BackwardOf::kAllLeaves : engine::BackwardOf::kChosenTensors;
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

}  // namespace fsdp::paging
