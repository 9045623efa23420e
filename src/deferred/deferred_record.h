#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <memory>

#include "deferred/deferred_storage.h"

namespace fsdp::deferred {

/// The session of the deferred_init that this thread is in; null outside of one.
std::shared_ptr<DeferredSession>& current_session();

/// Takes the place of an operator's call while recording, and of a call with arguments that have no memory.
void record(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace fsdp::deferred
