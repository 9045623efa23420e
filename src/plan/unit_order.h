#pragma once

#include <torch/nn/module.h>

#include <vector>

#include "engine/engine.h"
#include "fsdp/plan.h"
#include "plan/planned_step.h"
#include "shard/unit_division.h"

namespace fsdp::planning {

/// Returns the passes of a model whose modules are used in the order in which they were registered. `plans`: its units.
Passes module_order(const torch::nn::Module& module, const std::vector<shard::UnitPlan>& plans);

/// Returns the passes in which units are entered in this order. Throws Error if it names a unit that does not exist.
Passes given_order(const UnitOrder& order, const engine::Engine& engine);

}  // namespace fsdp::planning
