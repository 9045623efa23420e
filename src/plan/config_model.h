#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>

namespace fsdp::planning {

/// A module of a model that is made of shapes alone: its parameters are on the meta device.
class ConfigModule : public torch::nn::Module {
 public:
  using torch::nn::Module::Module;

  /// Of a block and the head: the multiplications that a token takes in forward, without attention. Of experts, those that it comes to
  /// count.
  double multiplications = 0;
  /// Of a block: the elements of a query over all heads. Attention takes two multiplications for each of them and each token before.
  double attention_width = 0;
  /// And not tied to the other one, so that it can be a unit of its own.
  bool is_embedding_or_head = false;
};

/// A block of such a model, which is a unit.
class ConfigLayer final : public ConfigModule {
 public:
  using ConfigModule::ConfigModule;
};

/// Makes the model that a config.json of Hugging Face's transformers describes, by its shapes, with parameters of fp32: of model_type
/// llama, mistral, qwen2, qwen3, mixtral, deepseek_v3 (without the layers of multi-token prediction) or gpt2. Throws Error for other types,
/// and for a text that is no such configuration; the message names the key.
std::shared_ptr<torch::nn::Module> model_of_config(const std::string& text);

}  // namespace fsdp::planning
