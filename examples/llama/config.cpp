#include "llama/config.h"

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>

namespace llama {
namespace {

using Json = nlohmann::json;

/// An entry, or the default where it is left out or null.
template <typename T>
T get_or(const Json& json, const char* name, T otherwise) {
  const auto found = json.find(name);
  return found == json.end() || found->is_null() ? otherwise : found->get<T>();
}

std::optional<std::int64_t> optional_integer(const Json& json, const char* name) {
  const auto found = json.find(name);
  return found == json.end() || found->is_null() ? std::nullopt : std::optional(found->get<std::int64_t>());
}

/// One, or a list of them.
std::vector<std::int32_t> integers(const Json& json, const char* name) {
  const auto found = json.find(name);
  if (found == json.end() || found->is_null()) return {};
  return found->is_array() ? found->get<std::vector<std::int32_t>>() : std::vector<std::int32_t>{found->get<std::int32_t>()};
}

std::int64_t positive(const Json& json, const char* name) {
  const auto value = get_or<std::int64_t>(json, name, 0);
  if (value <= 0) throw std::runtime_error(std::string(name) + " is missing, or not positive");
  return value;
}

void refuse_if(bool is_other, const std::string& what) {
  if (is_other) throw std::runtime_error(what);
}

/// transformers 5 has all of it in "rope_parameters", earlier ones in "rope_theta" and "rope_scaling".
void read_rope(const Json& json, Config& config) {
  const Json nothing = Json::object();
  const bool is_new = json.contains("rope_parameters") && !json["rope_parameters"].is_null();
  const Json rope = is_new ? json["rope_parameters"] : get_or<Json>(json, "rope_scaling", nothing);
  config.rope_theta = get_or(rope, "rope_theta", get_or(json, "rope_theta", 10'000.0));
  refuse_if(get_or(rope, "partial_rotary_factor", get_or(json, "partial_rotary_factor", 1.0)) != 1.0,
            "partial_rotary_factor is not 1; only embeddings that rotate all of a head are supported");
  const auto type = get_or<std::string>(rope, "rope_type", get_or<std::string>(rope, "type", "default"));
  if (type == "default") return;
  refuse_if(type != "llama3", "rope_type is '" + type + "'; supported are default and llama3");
  config.llama3_rope = {rope.at("factor").get<double>(), rope.at("low_freq_factor").get<double>(),
                        rope.at("high_freq_factor").get<double>(),
                        get_or(rope, "original_max_position_embeddings", get_or(json, "max_position_embeddings", 2048.0))};
}

Config config_of(const Json& json) {
  const auto type = get_or<std::string>(json, "model_type", "");
  refuse_if(type != "llama" && type != "qwen2" && type != "qwen3" && type != "mistral",
            "model_type is '" + type + "'; supported are llama, qwen2, qwen3 and mistral");
  const auto activation = get_or<std::string>(json, "hidden_act", "silu");
  refuse_if(activation != "silu", "hidden_act is '" + activation + "'; supported is silu");
  refuse_if(get_or(json, "attention_dropout", 0.0) != 0, "attention_dropout is not 0, and this model has no dropout");
  refuse_if(json.contains("quantization_config"), "quantization_config: quantized weights are not supported");

  Config config;
  config.vocab_size = positive(json, "vocab_size");
  config.hidden_size = positive(json, "hidden_size");
  config.intermediate_size = positive(json, "intermediate_size");
  config.num_hidden_layers = positive(json, "num_hidden_layers");
  config.num_attention_heads = positive(json, "num_attention_heads");
  config.num_key_value_heads = get_or(json, "num_key_value_heads", config.num_attention_heads);
  config.qk_norm = type == "qwen3";
  config.head_dim = get_or(json, "head_dim", config.qk_norm ? 128 : config.hidden_size / config.num_attention_heads);
  refuse_if(config.num_key_value_heads <= 0 || config.num_attention_heads % config.num_key_value_heads != 0,
            "num_key_value_heads does not divide num_attention_heads");
  refuse_if(config.head_dim <= 0 || config.head_dim % 2 != 0, "the width of a head is not even");
  config.rms_norm_eps = get_or(json, "rms_norm_eps", config.rms_norm_eps);
  read_rope(json, config);
  const bool has_bias = (type == "llama" || type == "qwen3") && get_or(json, "attention_bias", false);
  config.qkv_bias = type == "qwen2" || has_bias;
  config.attention_out_bias = has_bias;
  config.mlp_bias = type == "llama" && get_or(json, "mlp_bias", false);
  config.tie_word_embeddings = get_or(json, "tie_word_embeddings", false);
  config.max_position_embeddings = get_or(json, "max_position_embeddings", std::int64_t{2048});
  config.eos_token_ids = integers(json, "eos_token_id");
  config.pad_token_id = optional_integer(json, "pad_token_id");
  const bool slides = type == "mistral" || (type != "llama" && get_or(json, "use_sliding_window", false));
  if (slides) config.sliding_window = optional_integer(json, "sliding_window");
  if (config.sliding_window) config.max_position_embeddings = std::min(config.max_position_embeddings, *config.sliding_window);
  config.is_bf16 = get_or<std::string>(json, "dtype", get_or<std::string>(json, "torch_dtype", "float32")) == "bfloat16";
  return config;
}

}  // namespace

Config read_config(const std::filesystem::path& folder) {
  const auto path = folder / "config.json";
  std::ifstream file(path);
  if (!file) throw std::runtime_error("cannot read " + path.string() + ": --model is a folder of Hugging Face's, with config.json");
  try {
    return config_of(Json::parse(file));
  } catch (const std::exception& error) {
    throw std::runtime_error(path.string() + ": " + error.what());
  }
}

}  // namespace llama
