#include "engine/left_gradients.h"

namespace fsdp::engine {

bool has_left_gradients(Engine& engine) {
  engine.recover();
  const auto lock = engine.lock();
  return engine.reducer_.has_gradients();
}

}  // namespace fsdp::engine
