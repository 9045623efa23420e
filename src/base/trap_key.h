#pragma once

#include <c10/core/DispatchKey.h>

namespace fsdp {

/// The dispatch key of tensors whose operators the trap sees: parameters of sharded models, and tensors made by deferred_init. It is above
/// autograd, autocast and every backend, torch 2.11 and later do not use it, and views and saved tensors inherit it.
inline constexpr auto kTrapKey = c10::DispatchKey::DeferredInit;

}  // namespace fsdp
