#pragma once

#include <memory>

#include "engine/engine.h"

namespace fsdp::paging {

/// To be called before the engine is told of an entry or a gradient. Inside of a backward that the engine does not know yet: announces it,
/// and queues its end as autograd's final callback. Outside: lets the engine recover from a backward that an exception ended.
void watch_backward(const std::shared_ptr<engine::Engine>& engine);

/// Which phase the operators of this thread belong to. Those of a backward run without grad mode; with it, a forward is repeated within the
/// backward (activation checkpointing), or the backward is being recorded to be differentiated itself.
engine::Phase current_phase();

/// True inside of a backward for all leaves, and not for tensors that were chosen (grad(), or backward() with inputs).
bool is_for_all_leaves();

}  // namespace fsdp::paging
