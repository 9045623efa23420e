#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "llama/rope.h"

// What config.json of a Hugging Face folder says about a model of the Llama family.

namespace llama {

struct Config {
  std::int64_t vocab_size = 0;
  std::int64_t hidden_size = 0;
  std::int64_t intermediate_size = 0;
  std::int64_t num_hidden_layers = 0;
  std::int64_t num_attention_heads = 0;
  std::int64_t num_key_value_heads = 0;  ///< Divides num_attention_heads; fewer of them is grouped-query attention.
  std::int64_t head_dim = 0;             ///< Even.
  double rms_norm_eps = 1e-6;
  Rope rope;
  bool qkv_bias = false;
  bool attention_out_bias = false;
  bool qk_norm = false;  ///< Each head's queries and keys have a norm (Qwen3).
  bool mlp_bias = false;
  bool tie_word_embeddings = false;          ///< The head is the embedding, unless the files have both, and they differ.
  std::int64_t longest = 0;                  ///< Tokens of the longest sequence that the model is meant for.
  std::vector<std::int32_t> eos_token_ids;   ///< Tokens that end a text.
  std::optional<std::int64_t> pad_token_id;  ///< Its embedding gets no gradient.
  std::int64_t sliding_window = 0;           ///< Tokens that one sees in the layers that slide, itself among them; 0 if none do.
  std::vector<bool> slides;                  ///< Whether it does, for each layer; in the others, one sees all that came before.
  std::string dtype = "float32";             ///< Of the files; also bfloat16 or float16.
};

/// Reads `folder`/config.json of a Llama, Qwen2, Qwen3 or Mistral, and what ends a text from `folder`/generation_config.json. Throws
/// std::runtime_error with one line of text, which names the file and the entry, where it cannot be read, or where it asks for what this
/// model does not compute; also if the weights are not safetensors.
Config read_config(const std::filesystem::path& folder);

}  // namespace llama
