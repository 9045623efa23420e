#include "llama/model.h"

#include <fsdp/activation_checkpoint.h>
#include <fsdp/tie_parameters.h>
#include <torch/torch.h>

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

/// Of the layers that slide, if some do; x is [batch, time, hidden_size].
Sight sliding_sight(const Config& config, const at::Tensor& x) {
  if (config.sliding_window == 0) return {};
  Sight sight{.window = config.sliding_window, .mask = {}};
  const auto time = x.size(1);
  if (time > config.sliding_window) {
    sight.mask = at::ones({time, time}, at::device(x.device()).dtype(at::kBool)).tril().triu(1 - config.sliding_window);
  }
  return sight;
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

at::Tensor AttentionImpl::forward(const at::Tensor& x, const Rotary& rotary, const Sight& sight, LayerCache* cache) {
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
  const auto length = keys.size(2);
  const bool is_beginning = queries.size(2) == length;
  if (!is_beginning && sight.window && length > *sight.window) {  // one query, which sees the last ones
    keys = keys.narrow(2, length - *sight.window, *sight.window);
    values = values.narrow(2, length - *sight.window, *sight.window);
  }
  const bool is_masked = sight.mask.defined();
  const auto y = at::scaled_dot_product_attention(queries, keys, values, is_masked ? std::optional(sight.mask) : std::nullopt,
                                                  /*dropout_p=*/0, /*is_causal=*/is_beginning && !is_masked, /*scale=*/std::nullopt,
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

at::Tensor LayerImpl::forward(const at::Tensor& x, const Rotary& rotary, const Sight& sight, LayerCache* cache) {
  const auto y = x + self_attn_(input_layernorm_(x), rotary, sight, cache);
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

at::Tensor BodyImpl::forward(const at::Tensor& tokens, KeyValueCache* cache, std::int64_t length) {
  const auto before = cache != nullptr ? cache->length() : 0;
  const auto time = tokens.size(1);
  TORCH_CHECK(before == 0 || time == 1, "llama: ", time, " tokens follow those in the cache; one at a time can");
  auto x = embed_tokens(tokens);
  const auto rotary = rotary_of(config_.rope, config_.head_dim, x, before, length);
  const auto sliding = sliding_sight(config_, x);
  for (std::size_t i = 0; i < layers_->size(); ++i) {
    auto* layer = (*layers_)[i]->as<LayerImpl>();
    auto* layer_cache = cache != nullptr ? &cache->layer(i) : nullptr;
    const auto sight = config_.slides[i] ? sliding : Sight();
    const auto run = [layer, layer_cache, rotary, sight](const at::Tensor& input) {
      return layer->forward(input, rotary, sight, layer_cache);
    };
    x = recompute_ ? fsdp::activation_checkpoint(run, x) : run(x);
  }
  return norm_(x);
}

ModelImpl::ModelImpl(const Config& config, bool recompute)
    : model_(register_module("model", Body(config, recompute))),
      lm_head_(register_module("lm_head", linear(config.hidden_size, config.vocab_size, false))) {
  if (config.tie_word_embeddings) fsdp::tie_parameters(*lm_head_, lm_head_->weight, model_->embed_tokens->weight);
}

at::Tensor ModelImpl::forward(const at::Tensor& tokens) { return lm_head_(model_(tokens, nullptr, tokens.size(1))); }

at::Tensor ModelImpl::next_logits(const at::Tensor& tokens, KeyValueCache& cache) {
  const auto time = tokens.size(1);
  return lm_head_(model_(tokens, &cache, cache.length() + time).narrow(1, time - 1, 1));
}

at::Tensor ModelImpl::loss(const at::Tensor& tokens) {
  const auto time = tokens.size(1) - 1;
  const auto logits = lm_head_(model_(tokens.narrow(1, 0, time), nullptr, time + 1)).to(at::kFloat);
  return at::cross_entropy_loss(logits.flatten(0, 1), tokens.narrow(1, 1, time).flatten());
}

}  // namespace llama
