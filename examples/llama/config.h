#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

// What config.json of a Hugging Face folder says about a model of the Llama family.

namespace llama {

/// Llama 3.1's stretching of rotary embeddings to longer sequences: `rope_type` "llama3".
struct Llama3Rope {
  double factor = 8;
  double low_freq_factor = 1;
  double high_freq_factor = 4;
  double original_max_position_embeddings = 8192;
};

struct Config {
  std::int64_t vocab_size = 0;
  std::int64_t hidden_size = 0;
  std::int64_t intermediate_size = 0;
  std::int64_t num_hidden_layers = 0;
  std::int64_t num_attention_heads = 0;
  std::int64_t num_key_value_heads = 0;  ///< Divides num_attention_heads; fewer of them is grouped-query attention.
  std::int64_t head_dim = 0;             ///< Even.
  double rms_norm_eps = 1e-6;
  double rope_theta = 10'000;
  std::optional<Llama3Rope> llama3_rope;
  bool qkv_bias = false;
  bool attention_out_bias = false;
  bool qk_norm = false;  ///< Each head's queries and keys have a norm (Qwen3).
  bool mlp_bias = false;
  bool tie_word_embeddings = false;
  std::int64_t max_position_embeddings = 0;    ///< The longest sequence; the sliding window, if that is shorter.
  std::vector<std::int32_t> eos_token_ids;     ///< Tokens that end a text.
  std::optional<std::int64_t> pad_token_id;    ///< Its embedding gets no gradient.
  std::optional<std::int64_t> sliding_window;  ///< Longer sequences are refused: attention is over all that came before.
  bool is_bf16 = false;                        ///< The files hold bfloat16.
};

/// Reads `folder`/config.json of a Llama, Qwen2, Qwen3 or Mistral. Throws std::runtime_error with one line of text, which names the file
/// and the entry, where it cannot be read, or where it asks for what this model does not compute.
Config read_config(const std::filesystem::path& folder);

}  // namespace llama
