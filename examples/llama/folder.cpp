#include "llama/folder.h"

#include <fsdp/fsdp.h>
#include <torch/torch.h>

#include <string>

namespace llama {
namespace {

namespace fs = std::filesystem;

/// The folder that holds the weights beside config.json may hold other things: only these are small, and describe the model.
bool is_description(const fs::path& file) {
  const auto name = file.filename().string();
  const auto ending = file.extension();
  if (name.ends_with(".index.json")) return false;
  return ending == ".json" || ending == ".txt" || ending == ".model" || ending == ".jinja";
}

}  // namespace

Model load_sharded(const fs::path& folder, const Config& config, const fsdp::DeviceMesh& mesh, const LoadOptions& options) {
  auto model = fsdp::deferred_init([&] { return Model(config, options.recompute); }, {.draw = false});

  fsdp::FullyShardOptions sharding{.mesh = mesh, .initial_values = fsdp::InitialValues::kZero};
  sharding.units = [](const std::string& name, const torch::nn::Module& module) {
    return name == "model.embed_tokens" || name == "lm_head" || dynamic_cast<const LayerImpl*>(&module) != nullptr;
  };
  const auto dtype = options.bf16 ? at::kBFloat16 : at::kFloat;
  sharding.mixed_precision = fsdp::MixedPrecisionPolicy{.param_dtype = dtype, .grad_comm_dtype = dtype};
  fsdp::fully_shard(*model, sharding);

  // What some files hold beside the parameters: a tied head once more, and tables of old versions.
  const auto is_surplus = [&config](const std::string& name) {
    return (config.tie_word_embeddings && name == "model.lm_head.weight") || name.ends_with(".rotary_emb.inv_freq");
  };
  fsdp::load(folder.string(), *model, {.ignore = is_surplus});
  return model;
}

Model load_whole(const fs::path& folder, const Config& config, const fsdp::DeviceMesh& mesh) {
  auto model = load_sharded(folder, config, mesh, {});
  fsdp::fully_unshard(*model);
  return model;
}

void write_folder(const fs::path& to, Model& model, const fs::path& from, const Config& config, const fsdp::DeviceMesh& mesh) {
  fsdp::export_safetensors(to.string(), *model, {.dtype = config.is_bf16 ? at::kBFloat16 : at::kFloat});
  if (mesh.rank() == 0) {
    for (const auto& entry : fs::directory_iterator(from)) {
      if (entry.is_regular_file() && is_description(entry.path())) fs::copy_file(entry.path(), to / entry.path().filename());
    }
  }
  mesh.barrier();
}

}  // namespace llama
