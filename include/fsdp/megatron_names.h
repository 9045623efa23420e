#pragma once

#include <torch/nn/module.h>

#include <string>
#include <vector>

#include "fsdp/save_load.h"

namespace fsdp {

/// Options to load a checkpoint that a program of NVIDIA's Megatron-FSDP has saved as {"model": model.state_dict(), "optimizer":
/// optimizer.state_dict()}. Its names are `model.module.NAME` and `optimizer.state.NUMBER.KIND`, where the number is the parameter's
/// position in the optimizer's groups, one group after the other.
///
///     fsdp::load("ckpt", *model, optimizer, fsdp::megatron_names(*model));
///
/// `parameters` are the names in that order. If the optimizer was made of model.parameters(), these are all names of the model. Parameters
/// that are not among them have no state in the checkpoint. Throws Error if a name is listed twice.
LoadOptions megatron_names(const std::vector<std::string>& parameters);
/// The same for all parameters of a sharded module, in the order of named_parameters().
LoadOptions megatron_names(torch::nn::Module& module);

}  // namespace fsdp
