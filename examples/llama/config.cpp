#include "llama/config.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
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

/// An entry, or the default where it is left out; null is nothing.
std::optional<std::int64_t> integer(const Json& json, const char* name, std::optional<std::int64_t> otherwise) {
  const auto found = json.find(name);
  if (found == json.end()) return otherwise;
  return found->is_null() ? std::nullopt : std::optional(found->get<std::int64_t>());
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

bool is_there(const Json& json, const char* name) {
  const auto found = json.find(name);
  return found != json.end() && !found->is_null();
}

double factor_of(const Json& rope, const char* name = "factor") {
  refuse_if(!is_there(rope, name), std::string("the parameters of rotary embeddings have no ") + name);
  return rope[name].get<double>();
}

YarnRope yarn_of(const Json& rope, double longest, double trained) {
  YarnRope yarn;
  yarn.trained = trained;
  yarn.factor = get_or(rope, "factor", longest / trained);
  const auto sharpness = [&](double scale) { return yarn.factor <= 1 ? 1.0 : 0.1 * scale * std::log(yarn.factor) + 1; };
  const auto scale = get_or(rope, "mscale", 0.0);
  const auto scale_of_all = get_or(rope, "mscale_all_dim", 0.0);
  const bool has_both = scale != 0 && scale_of_all != 0;
  yarn.attention_factor = get_or(rope, "attention_factor", has_both ? sharpness(scale) / sharpness(scale_of_all) : sharpness(1));
  // transformers takes 0 for nothing, too.
  if (const auto beta = get_or(rope, "beta_fast", 0.0); beta != 0) yarn.beta_fast = beta;
  if (const auto beta = get_or(rope, "beta_slow", 0.0); beta != 0) yarn.beta_slow = beta;
  yarn.truncates = get_or(rope, "truncate", true);
  return yarn;
}

/// transformers 5 has all of it in "rope_parameters", earlier ones in "rope_theta" and "rope_scaling", which goes before.
Rope rope_of(const Json& json, std::int64_t longest) {
  const bool is_old = is_there(json, "rope_scaling") && !json["rope_scaling"].empty();
  const Json rope = is_old ? json["rope_scaling"] : get_or<Json>(json, "rope_parameters", Json::object());
  refuse_if(rope.contains("full_attention") || rope.contains("sliding_attention"),
            "rope_parameters are given for each kind of layer; supported are those of all layers");
  Rope result;
  result.theta = get_or(rope, "rope_theta", get_or(json, "rope_theta", result.theta));
  const auto type = get_or<std::string>(rope, "rope_type", get_or<std::string>(rope, "type", "default"));
  const auto part = get_or(rope, "partial_rotary_factor", get_or(json, "partial_rotary_factor", 1.0));
  const auto most = static_cast<double>(longest);
  const auto trained = get_or(json, "original_max_position_embeddings", get_or(rope, "original_max_position_embeddings", most));
  // transformers' models of this family rotate all of a head by default, whatever this says, and compute nothing with the other types.
  refuse_if(part != 1 && type != "default" && type != "proportional",
            "partial_rotary_factor is not 1; rope_type '" + type + "' rotates all of a head");
  if (type == "linear") {
    result.scaling = LinearRope{factor_of(rope)};
  } else if (type == "dynamic") {
    result.scaling = DynamicRope{factor_of(rope), longest};
  } else if (type == "llama3") {
    result.scaling = Llama3Rope{factor_of(rope), factor_of(rope, "low_freq_factor"), factor_of(rope, "high_freq_factor"), trained};
  } else if (type == "yarn") {
    result.scaling = yarn_of(rope, most, trained);
  } else if (type == "proportional") {
    result.scaling = ProportionalRope{get_or(rope, "factor", 1.0), part};
  } else {
    refuse_if(type != "default", "rope_type is '" + type + "'; supported are default, linear, dynamic, llama3, yarn and proportional");
  }
  return result;
}

/// What transformers' classes take where an entry is left out. Null is something else for most of them: nothing.
struct Defaults {
  std::optional<std::int64_t> num_key_value_heads;
  std::int64_t max_position_embeddings;
};

Defaults defaults_of(const std::string& type) {
  if (type == "llama") return {std::nullopt, 2048};
  if (type == "mistral") return {8, 131'072};
  return {32, 32'768};
}

/// Which layers have a sliding window.
std::vector<bool> slides_of(const Json& json, const std::string& type, std::int64_t layers) {
  std::vector<bool> slides(static_cast<std::size_t>(layers), type == "mistral");
  if (type == "llama" || type == "mistral" || !get_or(json, "use_sliding_window", false)) return slides;
  if (is_there(json, "layer_types")) {
    const auto types = json["layer_types"].get<std::vector<std::string>>();
    refuse_if(types.size() != slides.size(), "layer_types has not as many entries as there are layers");
    for (std::size_t i = 0; i < slides.size(); ++i) {
      slides[i] = types[i] == "sliding_attention";
      refuse_if(!slides[i] && types[i] != "full_attention", "layer_types has '" + types[i] + "'");
    }
    return slides;
  }
  const auto first = get_or(json, "max_window_layers", std::int64_t{28});
  for (std::int64_t i = 0; i < layers; ++i) slides[static_cast<std::size_t>(i)] = i >= first;
  return slides;
}

Config config_of(const Json& json) {
  const auto type = get_or<std::string>(json, "model_type", "");
  refuse_if(type != "llama" && type != "qwen2" && type != "qwen3" && type != "mistral",
            "model_type is '" + type + "'; supported are llama, qwen2, qwen3 and mistral");
  const auto activation = get_or<std::string>(json, "hidden_act", "silu");
  refuse_if(activation != "silu", "hidden_act is '" + activation + "'; supported is silu");
  refuse_if(get_or(json, "attention_dropout", 0.0) != 0, "attention_dropout is not 0, and this model has no dropout");
  refuse_if(is_there(json, "quantization_config"), "quantization_config: quantized weights are not supported");

  Config config;
  config.vocab_size = positive(json, "vocab_size");
  config.hidden_size = positive(json, "hidden_size");
  config.intermediate_size = positive(json, "intermediate_size");
  config.num_hidden_layers = positive(json, "num_hidden_layers");
  config.num_attention_heads = positive(json, "num_attention_heads");
  const auto defaults = defaults_of(type);
  config.num_key_value_heads = integer(json, "num_key_value_heads", defaults.num_key_value_heads).value_or(config.num_attention_heads);
  config.qk_norm = type == "qwen3";
  config.head_dim = get_or(json, "head_dim", config.qk_norm ? 128 : config.hidden_size / config.num_attention_heads);
  refuse_if(config.num_key_value_heads <= 0 || config.num_attention_heads % config.num_key_value_heads != 0,
            "num_key_value_heads does not divide num_attention_heads");
  refuse_if(config.head_dim <= 0 || config.head_dim % 2 != 0, "the width of a head is not even");
  config.rms_norm_eps = get_or(json, "rms_norm_eps", config.rms_norm_eps);
  config.longest = get_or(json, "max_position_embeddings", defaults.max_position_embeddings);
  config.rope = rope_of(json, config.longest);
  if (std::holds_alternative<DynamicRope>(config.rope.scaling)) config.longest = std::numeric_limits<std::int64_t>::max();
  const bool has_bias = (type == "llama" || type == "qwen3") && get_or(json, "attention_bias", false);
  config.qkv_bias = type == "qwen2" || has_bias;
  config.attention_out_bias = has_bias;
  config.mlp_bias = type == "llama" && get_or(json, "mlp_bias", false);
  config.tie_word_embeddings = get_or(json, "tie_word_embeddings", false);
  config.eos_token_ids = integers(json, "eos_token_id");
  config.pad_token_id = integer(json, "pad_token_id", std::nullopt);
  config.slides.assign(static_cast<std::size_t>(config.num_hidden_layers), false);
  if (const auto window = integer(json, "sliding_window", 4096)) {
    config.slides = slides_of(json, type, config.num_hidden_layers);
    const bool any = std::find(config.slides.begin(), config.slides.end(), true) != config.slides.end();
    refuse_if(any && *window <= 0, "sliding_window is not positive");
    if (any) config.sliding_window = *window;
  }
  config.dtype = get_or<std::string>(json, "dtype", get_or<std::string>(json, "torch_dtype", config.dtype));
  refuse_if(config.dtype != "float32" && config.dtype != "bfloat16" && config.dtype != "float16",
            "dtype is '" + config.dtype + "'; supported are float32, bfloat16 and float16");
  return config;
}

/// With `read`, what a JSON file says; errors name the file.
template <typename Read>
auto read_file(const std::filesystem::path& path, const Read& read) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error("cannot read " + path.string() + ": --model is a folder of Hugging Face's, with config.json");
  try {
    return read(Json::parse(file));
  } catch (const std::exception& error) {
    throw std::runtime_error(path.string() + ": " + error.what());
  }
}

/// A folder of before safetensors; beside these, nobody reads its weights.
void check_weights(const std::filesystem::path& folder) {
  if (std::filesystem::exists(folder / "model.safetensors") || std::filesystem::exists(folder / "model.safetensors.index.json")) return;
  for (const char* name : {"pytorch_model.bin", "pytorch_model.bin.index.json"}) {
    refuse_if(std::filesystem::exists(folder / name), folder.string() + " has its weights in " + name +
                                                          ", which only Python reads: write it anew as safetensors, with transformers' " +
                                                          "from_pretrained() and save_pretrained()");
  }
}

}  // namespace

Config read_config(const std::filesystem::path& folder) {
  auto config = read_file(folder / "config.json", config_of);
  // As transformers: the file rules, where there is one, even if it names no token.
  if (const auto generation = folder / "generation_config.json"; std::filesystem::exists(generation)) {
    config.eos_token_ids = read_file(generation, [](const Json& json) { return integers(json, "eos_token_id"); });
  }
  check_weights(folder);
  return config;
}

}  // namespace llama
