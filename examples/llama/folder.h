#pragma once

#include <fsdp/device_mesh.h>

#include <filesystem>

#include "llama/config.h"
#include "llama/model.h"

// A Hugging Face folder becomes a sharded model, and the reverse.

namespace llama {

struct LoadOptions {
  bool bf16 = false;       ///< Compute and exchange gradients in bfloat16; main parameters stay fp32.
  bool recompute = false;  ///< Compute layers again in backward instead of keeping their activations.
};

/// Builds the model without memory, shards it over `mesh`, and fills the shards from the folder's safetensors: each rank reads its own
/// ranges, and no rank holds the whole model. Collective. Throws fsdp::Error on every rank if the files are not the model's.
Model load_sharded(const std::filesystem::path& folder, const Config& config, const fsdp::DeviceMesh& mesh, const LoadOptions& options);

/// The same as an ordinary model, in fp32: each rank has all of it, to generate text.
Model load_whole(const std::filesystem::path& folder, const Config& config, const fsdp::DeviceMesh& mesh);

/// Writes the model's safetensors into the new folder `to`, in the dtype of config.json, and copies configuration and tokenizer from the
/// folder that it was loaded from. Collective. Throws fsdp::Error on every rank if the weights can't be written.
void write_folder(const std::filesystem::path& to, Model& model, const std::filesystem::path& from, const Config& config,
                  const fsdp::DeviceMesh& mesh);

}  // namespace llama
