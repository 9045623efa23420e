#pragma once

#include "engine/engine.h"
#include "engine/unit.h"

// Warnings, once per model, about calls that have no effect, which a program might not notice.
namespace fsdp::paging {

/// Warns that the program has called grad() of a parameter, whose gradient is in the shards.
void warn_of_grad(engine::Engine& engine, const engine::UnitParameter& parameter);

/// Call it after each backward for all leaves. After the first one with synchronization, rank 0 names the parameters that had no gradient
/// on any rank.
void warn_of_unused(engine::Engine& engine);

}  // namespace fsdp::paging
