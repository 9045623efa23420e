#pragma once

#include "engine/engine.h"
#include "engine/unit.h"

// What a program does in vain, and would not notice: said once per model.
namespace fsdp::paging {

/// Somebody asked for grad() of a parameter whose gradient is in the shards.
void warn_of_grad(engine::Engine& engine, const engine::UnitParameter& parameter);

/// To be called after each backward for all leaves: after the first one with synchronization, names the parameters that had no gradient on
/// any rank. On rank 0.
void warn_of_unused(engine::Engine& engine);

}  // namespace fsdp::paging
