#pragma once

#include <c10/core/DispatchKey.h>

namespace fsdp {

/// The dispatch key of tensors whose operators the trap sees: parameters of sharded models, and what deferred_init makes. It sits above
/// autograd, autocast and every backend, torch 2.11 and later use it for nothing, and views and saved tensors inherit it.
inline constexpr auto kTrapKey = c10::DispatchKey::DeferredInit;

}  // namespace fsdp
