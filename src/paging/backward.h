#pragma once

#include <memory>

#include "engine/engine.h"

namespace fsdp::paging {

/// Call it before the engine is notified of an entry or a gradient. Inside of a backward that the engine does not know yet, it announces
/// the backward, and queues its end as autograd's final callback. Outside of a backward, it lets the engine recover from one that an
/// exception has ended.
void watch_backward(const std::shared_ptr<engine::Engine>& engine);

}  // namespace fsdp::paging
