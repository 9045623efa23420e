// Models from config.json, by their shapes.

#include "plan/config_model.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "fsdp/error.h"
#include "fsdp/plan.h"

namespace config_model_test {

using fsdp::planning::model_of_config;

std::int64_t elements_of(const torch::nn::Module& model) {
  std::map<const void*, std::int64_t> elements;  // Tied ones once.
  for (const auto& parameter : model.parameters()) elements[parameter.unsafeGetTensorImpl()] = parameter.numel();
  std::int64_t sum = 0;
  for (const auto& [parameter, numel] : elements) sum += numel;
  return sum;
}

TEST(ConfigModel, HasThePublishedNumbersOfParameters) {
  struct Case {
    std::string text;
    std::int64_t elements;
  };
  const std::vector<Case> cases = {
      {R"({"model_type": "llama", "vocab_size": 128256, "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126,
           "num_attention_heads": 128, "num_key_value_heads": 8})",
       405'853'388'800},
      {R"({"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": false, "mlp_bias": false})",
       8'030'261'248},
      {R"({"model_type": "mistral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 8})",
       7'241'732'096},
      {R"({"model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
           "num_attention_heads": 28, "num_key_value_heads": 4})",
       7'615'616'512},
      {R"({"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
           "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "attention_bias": false})",
       8'190'735'360},
      {R"({"model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8})",
       46'702'792'704},
      {R"({"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_positions": 1024})", 124'439'808},
  };
  for (const auto& [text, elements] : cases) EXPECT_EQ(elements_of(*model_of_config(text)), elements) << text;
}

/// DeepSeek-V3's sizes.
constexpr const char* kDeepSeekV3 =
    R"({"model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "num_hidden_layers": 61, "first_k_dense_replace": 3, "num_attention_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1,
        "num_experts_per_tok": 8})";

TEST(ConfigModel, OfDeepSeekV3HasThePublishedElements) {
  const auto model = model_of_config(kDeepSeekV3);
  // Published: 671'026'419'200, of which the biases that balance experts are buffers.
  const std::int64_t width = 7168;
  const std::int64_t attention = width * 1536 + 1536 + 1536 * 128 * 192 + width * 576 + 512 + 512 * 128 * 256 + 128 * 128 * width;
  const std::int64_t expert = 3 * width * 2048;
  const std::int64_t sum =
      61 * (attention + 2 * width) + 3 * 3 * width * 18'432 + 58 * (257 * expert + 256 * width) + 2 * std::int64_t{129'280} * width + width;
  EXPECT_EQ(elements_of(*model), sum);
  std::int64_t biases = 0;
  for (const auto& buffer : model->buffers()) biases += buffer.numel();
  EXPECT_EQ(sum + biases, 671'026'419'200);
  double of_token = 0;
  for (const auto& module : model->modules()) {
    const auto* layer = dynamic_cast<const fsdp::planning::ConfigLayer*>(module.get());
    if (layer != nullptr) of_token += layer->multiplications;
  }
  // Published: 37 billion are active for each token; embeddings and the head are among them.
  EXPECT_NEAR(of_token + 2.0 * 129'280 * 7168, 37.5e9, 0.2e9);
}

TEST(ConfigModel, OfDeepSeekV3MayHaveWideQueriesAndNoDenseLayers) {
  std::string text = kDeepSeekV3;
  text.replace(text.find("\"q_lora_rank\": 1536"), 19, "\"q_lora_rank\": null");
  text.replace(text.find("\"first_k_dense_replace\": 3"), 26, "\"first_k_dense_replace\": 0");
  const auto parameters = model_of_config(text)->named_parameters();
  EXPECT_EQ(parameters["model.layers.0.self_attn.q_proj.weight"].sizes(), (std::vector<std::int64_t>{128 * 192, 7168}));
  EXPECT_EQ(parameters["model.layers.0.mlp.experts.down_proj"].sizes(), (std::vector<std::int64_t>{256, 7168, 2048}));
}

TEST(ConfigModel, IsPlannedBlockByBlock) {
  const auto model = model_of_config(
      R"({"model_type": "llama", "vocab_size": 100, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
          "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": true})");
  const auto plan = fsdp::plan(
      *model, {.mesh = fsdp::planned_device_mesh("cuda", {{"dp_shard", 4}}), .units = fsdp::each<fsdp::planning::ConfigLayer>()});
  ASSERT_EQ(plan.units.size(), 4U);
  EXPECT_EQ(plan.units[1].name, "model.layers.0");
  EXPECT_EQ(plan.units[0].elements, 100 * 16 + 16);
  for (const auto& parameter : model->parameters()) EXPECT_TRUE(parameter.is_meta());
}

std::string message_of(const std::string& text) {
  try {
    model_of_config(text);
  } catch (const fsdp::Error& error) {
    return error.what();
  }
  return "";
}

TEST(ConfigModel, RefusesWhatIsNoConfiguration) {
  EXPECT_NE(message_of("weights").find("this is no config.json"), std::string::npos);
  EXPECT_NE(message_of("[1]").find("this is no config.json"), std::string::npos);
  EXPECT_NE(message_of("{}").find("model_type '' is none of llama"), std::string::npos);
  EXPECT_NE(message_of(R"({"model_type": "llama"})").find("has no 'hidden_size'"), std::string::npos);
  EXPECT_NE(message_of(R"({"model_type": "gpt2", "n_embd": -5})").find("'n_embd' is -5, and no size"), std::string::npos);
}

}  // namespace config_model_test
