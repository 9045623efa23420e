#pragma once

#include <torch/nn/module.h>

#include "fsdp/fully_shard.h"
#include "plan/budget.h"
#include "shard/model_draft.h"

namespace fsdp {

/// Chooses what options.memory_budget leaves open, for a model that all ranks have drafted alike, and writes it into `options`; which units
/// are kept is in the choice. Collective over a tensor-parallel mesh only. Throws Error on every rank if nothing fits.
planning::Chosen choose_within_budget(const torch::nn::Module& module, const shard::ModelDraft& draft, FullyShardOptions& options);

}  // namespace fsdp
