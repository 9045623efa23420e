#pragma once

#include "engine/schedule.h"

// Questions that triggers have about what autograd is doing on this thread.
namespace fsdp::trigger {

/// Returns the pass to which the operators of this thread belong. Those of a backward run without grad mode; with it, a forward is
/// repeated within the backward (activation checkpointing), or the backward is being recorded to be differentiated itself.
engine::Pass current_pass();

/// True inside of a backward.
bool inside_backward();

/// True inside of a backward for all leaves, and not for tensors that were chosen (grad(), or backward() with inputs).
bool is_for_all_leaves();

}  // namespace fsdp::trigger
