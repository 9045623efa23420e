#pragma once

#include <torch/csrc/autograd/engine.h>

#include <memory>
#include <utility>

#include "engine/engine.h"
#include "trigger/autograd_pass.h"

namespace fsdp::trigger {

/// Call it before the engine is notified of an entry or a gradient. Inside of a backward that the engine does not know yet, announces it by
/// `begin(alive, of)`, and queues `end(of)` as autograd's final callback. Returns true if this call has announced it. Of several threads,
/// only one does.
template <typename Begin, typename End>
bool watch_backward(engine::Engine& engine, const Begin& begin, End end) {
  if (!inside_backward() || engine.in_backward()) return false;
  // The callback, and with it the token, lives exactly as long as the backward: autograd drops it unrun if the backward throws.
  const auto alive = std::make_shared<char>();
  const auto of = is_for_all_leaves() ? engine::BackwardOf::kAllLeaves : engine::BackwardOf::kChosenTensors;
  if (!begin(alive, of)) return false;
  torch::autograd::Engine::get_default_engine().queue_callback([alive, of, end = std::move(end)] { end(of); });
  return true;
}

}  // namespace fsdp::trigger
