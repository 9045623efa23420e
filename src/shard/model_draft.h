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

/// A unit without process groups and memory: all that can be refused has been.
struct UnitDraft {
  std::vector<engine::UnitParameter> parameters;
  layout::UnitLayout layout;
  std::vector<engine::SubBufferFormat> formats;
};

/// What fully_shard will make of a model, decided on this rank alone.
struct ModelDraft {
  std::vector<UnitPlan> plans;
  std::vector<UnitDraft> units;  ///< One per plan.
  DeviceMesh tensor_parallel;    ///< Undefined: no parameter is a piece.
  std::string description;       ///< Equal on all ranks of options.mesh, or they must not go on.
  std::string pieces;            ///< The same for all ranks of tensor_parallel, whose pieces may differ in size.
  std::string warning;           ///< What is probably not intended. The same on all ranks.
};

/// Drafts a model into `draft`, which keeps what was found out before an Error: for options, meshes and parameters that cannot be.
void draft_model(const torch::nn::Module& module, const FullyShardOptions& options, ModelDraft& draft);

/// Says which piece of what each tensor-parallel parameter is. Collective over draft.tensor_parallel.
void place_pieces(ModelDraft& draft, const FullyShardOptions& options);

}  // namespace fsdp::shard
