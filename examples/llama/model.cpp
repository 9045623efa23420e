#include "llama/model.h"

#include <fsdp/activation_checkpoint.h>
#include <fsdp/tie_parameters.h>
#include <torch/torch.h>

#include <numbers>
#include <tuple>

namespace llama {
namespace {

torch::nn::Linear linear(std::int64_t in, std::int64_t out, bool bias) {
  return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(bias));
}

torch::nn::Embedding embedding(const Config& config) {
  torch::nn::EmbeddingOptions options(config.vocab_size, config.hidden_size);
  if (config.pad_token_id) options.padding_idx(*config.pad_token_id);
  return torch::nn::Embedding(options);
}

/// By how much each pair of a head's elements turns per position, [head_dim / 2] in fp32 (Su et al., 2021).
at::Tensor frequencies(const Config& config, at::Device device) {
  const auto exponents = at::arange(0, config.head_dim, 2, at::device(device).dtype(at::kFloat)) / config.head_dim;
  const auto plain = 1.0 / at::pow(config.rope_theta, exponents);
  if (!config.llama3_rope) return plain;
  // Slow turns are slowed down by `factor`, fast ones stay, and those between are mixtures, by the turns within the original length.
  const auto& rope = *config.llama3_rope;
  const auto turns = plain * (rope.original_max_position_embeddings / (2 * std::numbers::pi));
  const auto mix = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1);
  return plain * mix + plain / rope.factor * (1 - mix);
}

/// Of the positions of x, [batch, time, hidden_size], the first of which is `first`.
Rotary rotary_of(const Config& config, const at::Tensor& x, std::int64_t first) {
  const auto positions = at::arange(first, first + x.size(1), at::device(x.device()).dtype(at::kFloat));
  const auto angles = at::outer(positions, frequencies(config, x.device())).repeat({1, 2});
  return {angles.cos().to(x.scalar_type()), angles.sin().to(x.scalar_type())};
}

/// Turns the pairs (i, i + head_dim / 2) of x, [batch, heads, time, head_dim].
at::Tensor rotate(const at::Tensor& x, const Rotary& rotary) {
  const auto halves = x.chunk(2, -1);
  return x * rotary.cos + at::cat({-halves[1], halves[0]}, -1) * rotary.sin;
}

}  // namespace

RMSNormImpl::RMSNormImpl(std::int64_t width, double eps) : weight(register_parameter("weight", at::ones({width}))), eps_(eps) {}

at::Tensor RMSNormImpl::forward(const at::Tensor& x) { return at::rms_norm(x, {x.size(-1)}, weight, eps_); }

AttentionImpl::AttentionImpl(const Config& config)
    : head_dim_(config.head_dim),
      q_proj_(register_module("q_proj", linear(config.hidden_size, config.num_attention_heads * head_dim_, config.qkv_bias))),
      k_proj_(register_module("k_proj", linear(config.hidden_size, config.num_key_value_heads * head_dim_, config.qkv_bias))),
      v_proj_(register_module("v_proj", linear(config.hidden_size, config.num_key_value_heads * head_dim_, config.qkv_bias))),
      o_proj_(register_module("o_proj", linear(config.num_attention_heads * head_dim_, config.hidden_size, config.attention_out_bias))) {
  if (!config.qk_norm) return;
  q_norm_ = register_module("q_norm", RMSNorm(head_dim_, config.rms_norm_eps));
  k_norm_ = register_module("k_norm", RMSNorm(head_dim_, config.rms_norm_eps));
}

at::Tensor AttentionImpl::forward(const at::Tensor& x, const Rotary& rotary, LayerCache* cache) {
  const auto heads = [this](const at::Tensor& y) { return y.unflatten(-1, {-1, head_dim_}).transpose(1, 2); };
  auto queries = heads(q_proj_(x));
  auto keys = heads(k_proj_(x));
  auto values = heads(v_proj_(x));
  if (q_norm_) {
    queries = q_norm_(queries);
    keys = k_norm_(keys);
  }
  queries = rotate(queries, rotary);
  keys = rotate(keys, rotary);
  if (cache != nullptr) std::tie(keys, values) = cache->append(keys, values);
  // One query attends to all that came before.
  const auto y = at::scaled_dot_product_attention(queries, keys, values, /*attn_mask=*/{}, /*dropout_p=*/0,
                                                  /*is_causal=*/keys.size(2) == queries.size(2), /*scale=*/std::nullopt,
                                                  /*enable_gqa=*/true);
  return o_proj_(y.transpose(1, 2).flatten(-2));
}

MLPImpl::MLPImpl(const Config& config)
    : gate_proj_(register_module("gate_proj", linear(config.hidden_size, config.intermediate_size, config.mlp_bias))),
      up_proj_(register_module("up_proj", linear(config.hidden_size, config.intermediate_size, config.mlp_bias))),
      down_proj_(register_module("down_proj", linear(config.intermediate_size, config.hidden_size, config.mlp_bias))) {}

at::Tensor MLPImpl::forward(const at::Tensor& x) { return down_proj_(at::silu(gate_proj_(x)) * up_proj_(x)); }

LayerImpl::LayerImpl(const Config& config)
    : self_attn_(register_module("self_attn", Attention(config))),
      mlp_(register_module("mlp", MLP(config))),
      input_layernorm_(register_module("input_layernorm", RMSNorm(config.hidden_size, config.rms_norm_eps))),
      post_attention_layernorm_(register_module("post_attention_layernorm", RMSNorm(config.hidden_size, config.rms_norm_eps))) {}

at::Tensor LayerImpl::forward(const at::Tensor& x, const Rotary& rotary, LayerCache* cache) {
  const auto y = x + self_attn_(input_layernorm_(x), rotary, cache);
  return y + mlp_(post_attention_layernorm_(y));
}

BodyImpl::BodyImpl(const Config& config, bool recompute)
    : embed_tokens(register_module("embed_tokens", embedding(config))),
      config_(config),
      recompute_(recompute),
      layers_(register_module("layers", torch::nn::ModuleList())),
      norm_(register_module("norm", RMSNorm(config.hidden_size, config.rms_norm_eps))) {
  for (std::int64_t i = 0; i < config.num_hidden_layers; ++i) layers_->push_back(Layer(config));
}

at::Tensor BodyImpl::forward(const at::Tensor& tokens, KeyValueCache* cache) {
  const auto before = cache != nullptr ? cache->length() : 0;
  const auto time = tokens.size(1);
  TORCH_CHECK(!config_.sliding_window || before + time <= *config_.sliding_window, "llama: ", before + time,
              " tokens are more than the sliding window of ", config_.sliding_window.value_or(0));
  TORCH_CHECK(before == 0 || time == 1, "llama: ", time, " tokens follow those in the cache; one at a time can");
  auto x = embed_tokens(tokens);
  const auto rotary = rotary_of(config_, x, before);
  for (std::size_t i = 0; i < layers_->size(); ++i) {
    auto* layer = (*layers_)[i]->as<LayerImpl>();
    auto* layer_cache = cache != nullptr ? &cache->layer(i) : nullptr;
    const auto run = [layer, layer_cache, rotary](const at::Tensor& input) { return layer->forward(input, rotary, layer_cache); };
    x = recompute_ ? fsdp::activation_checkpoint(run, x) : run(x);
  }
  return norm_(x);
}

ModelImpl::ModelImpl(const Config& config, bool recompute)
    : model_(register_module("model", Body(config, recompute))),
      lm_head_(register_module("lm_head", linear(config.hidden_size, config.vocab_size, false))) {
  if (config.tie_word_embeddings) fsdp::tie_parameters(*lm_head_, lm_head_->weight, model_->embed_tokens->weight);
}

at::Tensor ModelImpl::forward(const at::Tensor& tokens) { return lm_head_(model_(tokens, nullptr)); }

at::Tensor ModelImpl::next_logits(const at::Tensor& tokens, KeyValueCache& cache) {
  return lm_head_(model_(tokens, &cache).narrow(1, tokens.size(1) - 1, 1));
}

at::Tensor ModelImpl::loss(const at::Tensor& tokens) {
  const auto time = tokens.size(1) - 1;
  const auto logits = forward(tokens.narrow(1, 0, time)).to(at::kFloat);
  return at::cross_entropy_loss(logits.flatten(0, 1), tokens.narrow(1, 1, time).flatten());
}

}  // namespace llama
