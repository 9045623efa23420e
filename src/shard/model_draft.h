#pragma once

#include <torch/nn/module.h>

#include <string>
#include <vector>

#include "engine/unit.h"
#include "fsdp/device_mesh.h"
#include "fsdp/fully_shard.h"
#include "layout/unit_layout.h"
#include "shard/unit_division.h"

namespace fsdp::shard {

/// A unit before it gets process groups and memory. All checks that can refuse it have been made.
struct UnitDraft {
  std::vector<engine::UnitParameter> parameters;
  layout::UnitLayout layout;
  std::vector<engine::SubBufferFormat> formats;
};

/// The units that fully_shard will make of a model, as this rank alone has decided.
struct ModelDraft {
  std::vector<UnitPlan> plans;
  std::vector<UnitDraft> units;  ///< One per plan.
  DeviceMesh tensor_parallel;    ///< Undefined if no parameter is a tensor-parallel piece.
  std::string description;       ///< The text that must be the same on all ranks of options.mesh.
  std::string pieces;            ///< The text that must be the same on all ranks of tensor_parallel, whose pieces may differ in size.
  std::string warning;           ///< A warning about options that are probably not intended. It is the same on all ranks.
};

/// Drafts a model into `draft`. Throws Error for invalid options, meshes and parameters; `draft` then has what was decided before.
void draft_model(const torch::nn::Module& module, const FullyShardOptions& options, ModelDraft& draft);

/// Returns the options of the unit that `plan` will be.
engine::UnitOptions unit_options(const UnitPlan& plan, const FullyShardOptions& options, const engine::UnitCommunicators& communicators);

/// Sets the global shape and offset of each tensor-parallel parameter. Collective over draft.tensor_parallel.
void place_pieces(ModelDraft& draft, const FullyShardOptions& options);

}  // namespace fsdp::shard
