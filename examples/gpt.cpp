#include "gpt.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fsdp/activation_checkpoint.h>

#include <cmath>
#include <tuple>

namespace {

torch::nn::Linear linear(std::int64_t in, std::int64_t out) { return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false)); }

std::int64_t hidden_width(const GPTConfig& config) { return config.hidden > 0 ? config.hidden : (config.dim * 8 / 3 + 63) / 64 * 64; }

// Position p turns pair i of a head by p * base^(-2i / head_dim) (Su et al., 2021).
at::Tensor rotary_table(const GPTConfig& config) {
  const std::int64_t head_dim = config.dim / config.heads;
  const auto exponents = at::arange(0, head_dim, 2, at::kDouble) / static_cast<double>(-head_dim);
  const auto angles = at::outer(at::arange(config.context, at::kDouble), at::pow(config.rotary_base, exponents));
  return at::stack({angles.cos(), angles.sin()}, -1).to(at::kFloat);
}

// Turns neighbouring elements of the last dimension of x, [batch, time, 2, heads, head_dim], as complex numbers: one pass over x
// where sines and cosines apart would take five. Always in fp32, as half precision has no complex product.
at::Tensor rotate(const at::Tensor& x, const at::Tensor& rotary) {
  const auto turns = at::view_as_complex(rotary.to(at::kFloat)).unsqueeze(1).unsqueeze(1);
  const auto pairs = at::view_as_complex(x.to(at::kFloat).unflatten(-1, {-1, 2}));
  return at::view_as_real(pairs * turns).flatten(-2).to(x.scalar_type());
}

}  // namespace

RMSNormImpl::RMSNormImpl(std::int64_t dim, double eps) : weight(register_parameter("weight", at::ones({dim}))), eps_(eps) {}

at::Tensor RMSNormImpl::forward(const at::Tensor& x) { return at::rms_norm(x, {x.size(-1)}, weight, eps_); }

GPTBlockImpl::GPTBlockImpl(const GPTConfig& config)
    : heads_(config.heads),
      attention_norm_(register_module("attention_norm", RMSNorm(config.dim, config.norm_eps))),
      mlp_norm_(register_module("mlp_norm", RMSNorm(config.dim, config.norm_eps))),
      qkv_(register_module("qkv", linear(config.dim, 3 * config.dim))),
      attention_out_(register_module("attention_out", linear(config.dim, config.dim))),
      gate_up_(register_module("gate_up", linear(config.dim, 2 * hidden_width(config)))),
      mlp_out_(register_module("mlp_out", linear(hidden_width(config), config.dim))) {
  at::NoGradGuard no_grad;
  const double residual_std = 0.02 / std::sqrt(2.0 * static_cast<double>(config.layers));
  qkv_->weight.normal_(0, 0.02);
  attention_out_->weight.normal_(0, residual_std);
  gate_up_->weight.normal_(0, 0.02);
  mlp_out_->weight.normal_(0, residual_std);
}

at::Tensor GPTBlockImpl::forward(const at::Tensor& x, const at::Tensor& rotary, LayerCache* cache) {
  const auto y = x + attend(attention_norm_(x), rotary, cache);
  return y + swiglu(mlp_norm_(y));
}

at::Tensor GPTBlockImpl::attend(const at::Tensor& x, const at::Tensor& rotary, LayerCache* cache) {
  // Splits and unbinds, not slices: their backward is one concatenation instead of a zero-filled tensor for each part.
  const auto parts = qkv_(x).unflatten(-1, {3, heads_, -1}).split_with_sizes({2, 1}, 2);
  const auto queries_keys = rotate(parts[0], rotary).unbind(2);
  const auto queries = queries_keys[0].transpose(1, 2);
  auto keys = queries_keys[1].transpose(1, 2);
  auto values = parts[1].squeeze(2).transpose(1, 2);
  if (cache != nullptr) std::tie(keys, values) = cache->append(keys, values);
  // One query attends to all that came before.
  const auto y = at::scaled_dot_product_attention(queries, keys, values, /*attn_mask=*/{}, /*dropout_p=*/0,
                                                  /*is_causal=*/keys.size(2) == queries.size(2));
  return attention_out_(y.transpose(1, 2).flatten(-2));
}

at::Tensor GPTBlockImpl::swiglu(const at::Tensor& x) {
  const auto parts = gate_up_(x).chunk(2, -1);
  return mlp_out_(at::silu(parts[0]) * parts[1]);
}

GPTImpl::GPTImpl(const GPTConfig& config)
    : config_(config), embedding_(register_module("embedding", torch::nn::Embedding(config.vocab, config.dim))), norm_(nullptr) {
  TORCH_CHECK(config.dim % config.heads == 0 && config.dim / config.heads % 2 == 0, "GPTConfig: dim (", config.dim,
              ") must divide by heads (", config.heads, ") into an even width per head");
  at::NoGradGuard no_grad;
  embedding_->weight.normal_(0, 0.02);
  blocks_ = register_module("blocks", torch::nn::ModuleList());
  for (std::int64_t i = 0; i < config.layers; ++i) blocks_->push_back(GPTBlock(config));
  norm_ = register_module("norm", RMSNorm(config.dim, config.norm_eps));
  if (!config.tied) {
    head_ = register_module("head", linear(config.dim, config.vocab));
    head_->weight.normal_(0, 0.02);
  }
  rotary_ = register_buffer("rotary", rotary_table(config));
}

at::Tensor GPTImpl::hidden(const at::Tensor& tokens, KeyValueCache* cache) {
  const auto before = cache != nullptr ? cache->length() : 0;
  const auto time = tokens.size(1);
  TORCH_CHECK(before + time <= config_.context, "GPT: ", before + time, " tokens do not fit the context of ", config_.context);
  TORCH_CHECK(before == 0 || time == 1, "GPT: ", time, " tokens follow those in the cache; one at a time can");
  const auto rotary = rotary_.narrow(0, before, time);
  auto x = embedding_(tokens);
  for (std::size_t i = 0; i < blocks_->size(); ++i) {
    auto* block = (*blocks_)[i]->as<GPTBlockImpl>();
    auto* layer = cache != nullptr ? &cache->layer(i) : nullptr;
    const auto run = [block, layer](const at::Tensor& input, const at::Tensor& turns) { return block->forward(input, turns, layer); };
    x = config_.checkpoint ? fsdp::activation_checkpoint(run, x, rotary) : run(x, rotary);
  }
  return norm_(x);
}

at::Tensor GPTImpl::logits(const at::Tensor& x) { return config_.tied ? at::linear(x, embedding_->weight) : head_(x); }

at::Tensor GPTImpl::forward(const at::Tensor& tokens) { return logits(hidden(tokens, nullptr)); }

at::Tensor GPTImpl::next_logits(const at::Tensor& tokens, KeyValueCache& cache) {
  return logits(hidden(tokens, &cache).narrow(1, tokens.size(1) - 1, 1));
}

at::Tensor GPTImpl::loss(const at::Tensor& tokens, const at::Tensor& targets) {
  return at::cross_entropy_loss(forward(tokens).flatten(0, 1).to(at::kFloat), targets.flatten());
}
