#include "plan/config_model.h"

#include <ATen/ATen.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>
#include <vector>

#include "fsdp/error.h"

namespace fsdp::planning {
namespace {

using ParameterSizes = std::vector<std::int64_t>;
using ModulePtr = std::shared_ptr<ConfigModule>;

class Config {
 public:
  explicit Config(const std::string& text) {
    try {
      json_ = nlohmann::json::parse(text);
    } catch (const nlohmann::json::exception& error) {
      throw Error(std::string("this is no config.json: ") + error.what());
    }
    if (!json_.is_object()) throw Error("this is no config.json: it has no keys");
  }

  bool has(const char* key) const { return json_.contains(key) && !json_[key].is_null(); }
  std::int64_t size(const char* key) const {
    if (!has(key)) throw Error(std::string("config.json has no '") + key + "', which says a size of the model");
    if (!json_[key].is_number_integer() || json_[key].get<std::int64_t>() < 1) {
      throw Error(std::string("config.json: '") + key + "' is " + json_[key].dump() + ", and no size");
    }
    return json_[key].get<std::int64_t>();
  }
  std::int64_t size(const char* key, std::int64_t otherwise) const { return has(key) ? size(key) : otherwise; }
  /// As size(), but it may be 0.
  std::int64_t count(const char* key, std::int64_t otherwise) const {
    return has(key) && json_[key].is_number_integer() && json_[key].get<std::int64_t>() == 0 ? 0 : size(key, otherwise);
  }
  bool flag(const char* key, bool otherwise) const { return has(key) && json_[key].is_boolean() ? json_[key].get<bool>() : otherwise; }
  std::string type() const { return has("model_type") && json_["model_type"].is_string() ? json_["model_type"].get<std::string>() : ""; }

 private:
  nlohmann::json json_;
};

at::Tensor parameter(ConfigModule& module, const char* name, const ParameterSizes& sizes) {
  return module.register_parameter(name, at::empty(sizes, at::device(at::kMeta).dtype(at::kFloat)));
}

ModulePtr below(ConfigModule& module, const std::string& name) {
  return module.register_module(name, std::make_shared<ConfigModule>(name));
}

at::Tensor with_weight(ConfigModule& module, const char* name, const ParameterSizes& sizes, bool bias = false) {
  auto made = below(module, name);
  auto weight = parameter(*made, "weight", sizes);
  if (bias) parameter(*made, "bias", {sizes.front()});
  return weight;
}

double matrix_elements(const torch::nn::Module& module) {
  double elements = 0;
  for (const auto& weight : module.parameters()) {
    if (weight.dim() == 2) elements += static_cast<double>(weight.numel());
  }
  return elements;
}

void add_attention(ConfigModule& block, const Config& config, const std::string& type) {
  const auto width = config.size("hidden_size");
  const auto heads = config.size("num_attention_heads");
  const auto of_keys = config.size("num_key_value_heads", heads);
  const auto of_head = config.size("head_dim", width / heads);
  const bool bias = type == "qwen2" || config.flag("attention_bias", false);
  auto attention = below(block, "self_attn");
  with_weight(*attention, "q_proj", {heads * of_head, width}, bias);
  with_weight(*attention, "k_proj", {of_keys * of_head, width}, bias);
  with_weight(*attention, "v_proj", {of_keys * of_head, width}, bias);
  with_weight(*attention, "o_proj", {width, heads * of_head}, bias && type != "qwen2");
  block.attention_width = static_cast<double>(heads * of_head);
  block.multiplications += matrix_elements(*attention);
  if (type != "qwen3") return;
  with_weight(*attention, "q_norm", {of_head});
  with_weight(*attention, "k_norm", {of_head});
}

void add_layers_of_two_widths(ConfigModule& block, const Config& config, const std::string& type) {
  const auto width = config.size("hidden_size");
  const auto hidden = config.size("intermediate_size");
  if (type != "mixtral") {
    const bool bias = config.flag("mlp_bias", false);
    auto mlp = below(block, "mlp");
    with_weight(*mlp, "gate_proj", {hidden, width}, bias);
    with_weight(*mlp, "up_proj", {hidden, width}, bias);
    with_weight(*mlp, "down_proj", {width, hidden}, bias);
    block.multiplications += matrix_elements(*mlp);
    return;
  }
  auto mixture = below(block, "block_sparse_moe");
  const auto experts = config.size("num_local_experts");
  with_weight(*mixture, "gate", {experts, width});
  auto all = below(*mixture, "experts");
  for (std::int64_t k = 0; k < experts; ++k) {
    auto expert = below(*all, std::to_string(k));
    with_weight(*expert, "w1", {hidden, width});
    with_weight(*expert, "w2", {width, hidden});
    with_weight(*expert, "w3", {hidden, width});
  }
  const auto of_token = static_cast<double>(config.size("num_experts_per_tok", experts));
  block.multiplications += static_cast<double>(experts * width) + of_token * static_cast<double>(3 * width * hidden);
}

void with_norm(ConfigModule& module, const char* name, std::int64_t width) { with_weight(module, name, {width}); }

/// Attention of DeepSeek-V3: queries, and keys and values, come from narrow vectors.
void add_latent_attention(ConfigModule& block, const Config& config) {
  const auto width = config.size("hidden_size");
  const auto heads = config.size("num_attention_heads");
  const auto rotated = config.size("qk_rope_head_dim");
  const auto of_query = config.size("qk_nope_head_dim") + rotated;
  const auto of_value = config.size("v_head_dim");
  const auto narrow = config.size("kv_lora_rank");
  const bool bias = config.flag("attention_bias", false);
  auto attention = below(block, "self_attn");
  if (config.has("q_lora_rank")) {
    const auto of_queries = config.size("q_lora_rank");
    with_weight(*attention, "q_a_proj", {of_queries, width}, bias);
    with_norm(*attention, "q_a_layernorm", of_queries);
    with_weight(*attention, "q_b_proj", {heads * of_query, of_queries});
  } else {
    with_weight(*attention, "q_proj", {heads * of_query, width});
  }
  with_weight(*attention, "kv_a_proj_with_mqa", {narrow + rotated, width}, bias);
  with_norm(*attention, "kv_a_layernorm", narrow);
  with_weight(*attention, "kv_b_proj", {heads * (of_query - rotated + of_value), narrow});
  with_weight(*attention, "o_proj", {width, heads * of_value}, bias);
  block.multiplications += matrix_elements(*attention);
  block.attention_width = static_cast<double>(heads * (of_query + of_value)) / 2;
}

void add_gated_layers(ConfigModule& module, const char* name, std::int64_t width, std::int64_t hidden) {
  auto mlp = below(module, name);
  with_weight(*mlp, "gate_proj", {hidden, width});
  with_weight(*mlp, "up_proj", {hidden, width});
  with_weight(*mlp, "down_proj", {width, hidden});
}

/// Routed and shared experts of DeepSeek-V3, which transformers keeps in one tensor per matrix.
void add_experts(ConfigModule& block, const Config& config) {
  const auto width = config.size("hidden_size");
  const auto hidden = config.size("moe_intermediate_size");
  const auto experts = config.size("n_routed_experts");
  const auto shared = config.size("n_shared_experts") * hidden;
  auto mixture = below(block, "mlp");
  auto routed = below(*mixture, "experts");
  parameter(*routed, "gate_up_proj", {experts, 2 * hidden, width});
  parameter(*routed, "down_proj", {experts, width, hidden});
  auto gate = below(*mixture, "gate");
  parameter(*gate, "weight", {experts, width});
  gate->register_buffer("e_score_correction_bias", at::empty({experts}, at::device(at::kMeta).dtype(at::kFloat)));
  add_gated_layers(*mixture, "shared_experts", width, shared);
  const auto of_token = config.size("num_experts_per_tok") * hidden + shared;
  block.multiplications += static_cast<double>(experts * width + 3 * width * of_token);
}

void fill_layer(ConfigModule& block, const Config& config, const std::string& type, std::int64_t index) {
  const auto width = config.size("hidden_size");
  if (type == "deepseek_v3") {
    add_latent_attention(block, config);
    if (index >= config.count("first_k_dense_replace", 0)) {
      add_experts(block, config);
    } else {
      add_gated_layers(block, "mlp", width, config.size("intermediate_size"));
      block.multiplications += static_cast<double>(3 * width * config.size("intermediate_size"));
    }
  } else {
    add_attention(block, config, type);
    add_layers_of_two_widths(block, config, type);
  }
  with_norm(block, "input_layernorm", width);
  with_norm(block, "post_attention_layernorm", width);
}

void fill_embedding_and_head(ConfigModule& embedding, ConfigModule& head, const Config& config, std::int64_t width, bool are_tied) {
  const auto words = config.size("vocab_size");
  const auto weight = parameter(embedding, "weight", {words, width});
  if (are_tied) {
    head.register_parameter("weight", weight);
  } else {
    parameter(head, "weight", {words, width});
  }
  embedding.is_embedding_or_head = head.is_embedding_or_head = !are_tied;
  head.multiplications = static_cast<double>(words * width);
}

ModulePtr llama_like(const Config& config, const std::string& type) {
  const auto width = config.size("hidden_size");
  auto root = std::make_shared<ConfigModule>(type);
  auto model = below(*root, "model");
  auto embedding = below(*model, "embed_tokens");
  auto layers = below(*model, "layers");
  const auto count = config.size("num_hidden_layers");
  for (std::int64_t k = 0; k < count; ++k) {
    auto block = layers->register_module(std::to_string(k), std::make_shared<ConfigLayer>("block"));
    fill_layer(*block, config, type, k);
  }
  with_norm(*model, "norm", width);
  auto head = below(*root, "lm_head");
  fill_embedding_and_head(*embedding, *head, config, width, config.flag("tie_word_embeddings", false));
  return root;
}

void add_norm(ConfigModule& module, const char* name, std::int64_t width) { with_weight(module, name, {width}, /*bias=*/true); }

/// A layer of GPT-2, whose weights have their inputs first.
void add_projection(ConfigModule& module, const char* name, std::int64_t in, std::int64_t out) {
  auto made = below(module, name);
  parameter(*made, "weight", {in, out});
  parameter(*made, "bias", {out});
}

ModulePtr gpt2(const Config& config) {
  const auto width = config.size("n_embd");
  const auto hidden = config.size("n_inner", 4 * width);
  auto root = std::make_shared<ConfigModule>("gpt2");
  auto model = below(*root, "transformer");
  auto embedding = below(*model, "wte");
  with_weight(*model, "wpe", {config.size("n_positions"), width});
  auto layers = below(*model, "h");
  const auto count = config.size("n_layer");
  for (std::int64_t k = 0; k < count; ++k) {
    auto block = layers->register_module(std::to_string(k), std::make_shared<ConfigLayer>("block"));
    add_norm(*block, "ln_1", width);
    auto attention = below(*block, "attn");
    add_projection(*attention, "c_attn", width, 3 * width);
    add_projection(*attention, "c_proj", width, width);
    add_norm(*block, "ln_2", width);
    auto mlp = below(*block, "mlp");
    add_projection(*mlp, "c_fc", width, hidden);
    add_projection(*mlp, "c_proj", hidden, width);
    block->multiplications = matrix_elements(*block);
    block->attention_width = static_cast<double>(width);
  }
  add_norm(*model, "ln_f", width);
  auto head = below(*root, "lm_head");
  fill_embedding_and_head(*embedding, *head, config, width, config.flag("tie_word_embeddings", true));
  return root;
}

}  // namespace

std::shared_ptr<torch::nn::Module> model_of_config(const std::string& text) {
  const Config config(text);
  const auto type = config.type();
  if (type == "gpt2") return gpt2(config);
  const std::set<std::string> alike = {"llama", "mistral", "qwen2", "qwen3", "mixtral", "deepseek_v3"};
  if (!alike.contains(type)) {
    throw Error("config.json: model_type '" + type + "' is none of llama, mistral, qwen2, qwen3, mixtral, deepseek_v3 and gpt2");
  }
  return llama_like(config, type);
}

}  // namespace fsdp::planning
