#include "paging/backward.h"

#include <utility>

#include "engine/engine.h"
#include "paging/paged_model.h"
#include "paging/warnings.h"
#include "trigger/autograd_pass.h"
#include "trigger/watch_backward.h"

namespace fsdp::paging {

void watch_backward(const std::shared_ptr<engine::Engine>& engine) {
  auto& model = PagedModel::of(*engine);
  auto& gate = model.gate;
  if (!trigger::inside_backward()) {
    gate.alone([&] { engine->recover(); });
    return;
  }
  const auto begin = [&](const std::shared_ptr<char>& alive, engine::BackwardOf of) {
    bool begun = false;
    gate.alone([&] {
      const bool adds = engine->main().has_left_gradients();
      begun = engine->begin_backward(alive, of);
      if (begun && adds) model.adds_to_gradients = true;
    });
    return begun;
  };
  trigger::watch_backward(*engine, begin, [engine](engine::BackwardOf of) {
    auto& model = PagedModel::of(*engine);
    model.gate.alone([&] { engine->end_backward(); });
    model.validated = false;
    if (const auto call = std::exchange(model.after_first_backward, {})) call();
    if (of == engine::BackwardOf::kAllLeaves) warn_of_unused(*engine);
  });
}

}  // namespace fsdp::paging
