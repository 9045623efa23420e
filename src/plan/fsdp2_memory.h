#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "engine/engine.h"
#include "fsdp/plan.h"
#include "plan/planned_step.h"

namespace fsdp::planning {

/// A model and its steps, for which FSDP2 is planned.
struct FSDP2Model {
  const engine::Engine& engine;
  const Passes& passes;
  const std::vector<std::int64_t>& activations;  ///< By unit: see PlanOptions::activations.
  std::int64_t optimizer_values = 0;             ///< That the optimizer keeps for each element.
  bool root_stays = true;                        ///< From forward into backward.
  /// The dimension along which a parameter of a unit is cut. Empty: the first one.
  std::function<std::int64_t(std::size_t unit, std::size_t parameter)> shard_dim = {};
};

/// Follows the buffers of FSDP2 (torch.distributed.fsdp.fully_shard of torch 2.13) through a step: it pads each parameter's rows to a
/// multiple of the ranks, gathers a unit into one buffer and copies it into a tensor for each parameter, gathers one unit ahead in
/// backward, and reduces from a copy of the gradients. None if FSDP2 lacks one of the model's options.
std::optional<PlannedFSDP2> fsdp2_memory(const FSDP2Model& model);

}  // namespace fsdp::planning
