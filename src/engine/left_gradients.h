#pragma once

#include "engine/engine.h"

namespace fsdp::engine {

/// True if backwards have left gradients, reduced or not, that nobody has taken. A backward that died of an exception leaves none: the
/// engine recovers first. Call it between backwards.
bool has_left_gradients(Engine& engine);

}  // namespace fsdp::engine
