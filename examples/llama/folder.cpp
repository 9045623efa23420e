#include "llama/folder.h"

#include <fsdp/fsdp.h>
#include <torch/torch.h>

#include <algorithm>
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

at::ScalarType type_of(const std::string& dtype) {
  if (dtype == "bfloat16") return at::kBFloat16;
  return dtype == "float16" ? at::kHalf : at::kFloat;
}

/// Embedding and head, with the names that they have in the model.
class EndsImpl : public torch::nn::Module {
 public:
  explicit EndsImpl(const Config& config) {
    auto body = register_module("model", torch::nn::ModuleDict());
    body->update({{"embed_tokens", torch::nn::Embedding(config.vocab_size, config.hidden_size).ptr()}});
    register_module("lm_head", torch::nn::Linear(torch::nn::LinearOptions(config.hidden_size, config.vocab_size).bias(false)));
  }
};
TORCH_MODULE(Ends);

/// What a folder has of embedding and head.
struct HeadInFiles {
  bool is_its_own = false;    ///< Both, and they differ. transformers does not tie them then, whatever config.json says.
  bool is_embedding = false;  ///< The head alone: it is the embedding, too.
};

/// Of a model whose config.json ties them. Collective.
HeadInFiles head_in_files(const fs::path& folder, const Config& config, const fsdp::DeviceMesh& mesh) {
  auto ends = fsdp::deferred_init([&] { return Ends(config); }, {.draw = false});
  fsdp::FullyShardOptions sharding{.mesh = mesh, .initial_values = fsdp::InitialValues::kZero};
  // Cut alike.
  sharding.units = [](const std::string& name, const torch::nn::Module&) { return name == "model.embed_tokens" || name == "lm_head"; };
  fsdp::fully_shard(*ends, sharding);
  const auto missing = fsdp::load(folder.string(), *ends, {.strict = false}).missing;
  const auto has = [&](const char* name) { return std::find(missing.begin(), missing.end(), name) == missing.end(); };
  if (!has("model.lm_head.weight")) return {};
  if (!has("model.model.embed_tokens.weight")) return {.is_embedding = true};
  const auto shards = fsdp::handle(*ends).parameter_shards();  // none where this rank has no elements
  const bool differ = shards.size() == 2 && !shards[0].value.equal(shards[1].value);
  return {.is_its_own = mesh.sum(differ ? 1.0 : 0.0) > 0};
}

}  // namespace

Model load_sharded(const fs::path& folder, const Config& config, const fsdp::DeviceMesh& mesh, const LoadOptions& options) {
  const auto head = config.tie_word_embeddings ? head_in_files(folder, config, mesh) : HeadInFiles();
  auto built = config;
  built.tie_word_embeddings = config.tie_word_embeddings && !head.is_its_own;
  auto model = fsdp::deferred_init([&] { return Model(built, options.recompute); }, {.draw = false});

  fsdp::FullyShardOptions sharding{.mesh = mesh, .initial_values = fsdp::InitialValues::kZero};
  sharding.units = [](const std::string& name, const torch::nn::Module& module) {
    return name == "model.embed_tokens" || name == "lm_head" || dynamic_cast<const LayerImpl*>(&module) != nullptr;
  };
  const auto dtype = options.bf16 ? at::kBFloat16 : at::kFloat;
  sharding.mixed_precision = fsdp::MixedPrecisionPolicy{.param_dtype = dtype, .grad_comm_dtype = dtype};
  fsdp::fully_shard(*model, sharding);

  // What some files hold beside the parameters: a tied head once more, and tables of old versions.
  const auto is_surplus = [&](const std::string& name) {
    return (built.tie_word_embeddings && name == "model.lm_head.weight") || name.ends_with(".rotary_emb.inv_freq");
  };
  const auto rename = [&](const std::string& name) {
    return head.is_embedding && name == "model.model.embed_tokens.weight" ? "model.lm_head.weight" : name;
  };
  fsdp::load(folder.string(), *model, {.rename = rename, .ignore = is_surplus});
  return model;
}

Model load_whole(const fs::path& folder, const Config& config, const fsdp::DeviceMesh& mesh) {
  auto model = load_sharded(folder, config, mesh, {});
  fsdp::fully_unshard(*model);
  return model;
}

void write_folder(const fs::path& to, Model& model, const fs::path& from, const Config& config, const fsdp::DeviceMesh& mesh) {
  fsdp::export_safetensors(to.string(), *model, {.dtype = type_of(config.dtype)});
  if (mesh.rank() == 0) {
    for (const auto& entry : fs::directory_iterator(from)) {
      if (entry.is_regular_file() && is_description(entry.path())) fs::copy_file(entry.path(), to / entry.path().filename());
    }
  }
  mesh.barrier();
}

}  // namespace llama
