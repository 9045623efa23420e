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
