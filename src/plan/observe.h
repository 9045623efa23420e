#pragma once

#include <torch/nn/module.h>

#include <vector>

#include "fsdp/fully_shard.h"
#include "fsdp/memory_budget.h"
#include "plan/planned_step.h"

namespace fsdp::planning {

/// Plans as fsdp::plan() does, and throws for the same. `kept`: the units, by their positions, that stay gathered from forward into
/// backward; empty for none. options.memory_budget does not count.
Observed observe(const torch::nn::Module& module, const FullyShardOptions& options, const PlanOptions& planned,
                 const std::vector<bool>& kept);

}  // namespace fsdp::planning
