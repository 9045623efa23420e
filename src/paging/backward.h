#pragma once

#include <memory>

#include "engine/engine.h"

namespace fsdp::paging {

/// Call it before the engine is told of an entry or a gradient. Inside of a backward that the engine does not know yet: announces it, and
/// queues its end as autograd's final callback. Outside: lets the engine recover from a backward that an exception ended.
void watch_backward(const std::shared_ptr<engine::Engine>& engine);

}  // namespace fsdp::paging
