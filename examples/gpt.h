#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <cstdint>

#include "key_value_cache.h"

// A decoder-only transformer in plain LibTorch: RMSNorm, rotary embeddings, SwiGLU, no biases. It knows nothing about sharding, and
// computes in the dtype of its parameters.

struct GPTConfig {
  std::int64_t vocab = 256;    ///< Tokens: bytes by default.
  std::int64_t dim = 256;      ///< Width of the residual stream.
  std::int64_t layers = 6;     ///< Blocks.
  std::int64_t heads = 4;      ///< Attention heads; dim / heads must be whole and even.
  std::int64_t hidden = 0;     ///< Width of SwiGLU; 0 takes 8/3 of dim, rounded up to a multiple of 64.
  std::int64_t context = 256;  ///< The longest sequence.
  bool tied = false;           ///< The output layer is the embedding.
  bool checkpoint = false;     ///< Blocks compute again in backward instead of keeping their activations.
  double rotary_base = 10'000;
  double norm_eps = 1e-5;
};

/// Root-mean-square norm with a learned scale (Zhang and Sennrich, 2019).
class RMSNormImpl : public torch::nn::Module {
 public:
  RMSNormImpl(std::int64_t dim, double eps);
  at::Tensor forward(const at::Tensor& x);

  at::Tensor weight;

 private:
  double eps_;
};
TORCH_MODULE(RMSNorm);

/// Causal self-attention and a SwiGLU layer, each behind a norm and around a residual.
class GPTBlockImpl : public torch::nn::Module {
 public:
  explicit GPTBlockImpl(const GPTConfig& config);

  /// x is [batch, time, dim]; rotary the rows of the model's table for its positions, which follow those in the cache, if there is one.
  at::Tensor forward(const at::Tensor& x, const at::Tensor& rotary, LayerCache* cache = nullptr);

 private:
  at::Tensor attend(const at::Tensor& x, const at::Tensor& rotary, LayerCache* cache);
  at::Tensor swiglu(const at::Tensor& x);

  std::int64_t heads_;
  RMSNorm attention_norm_, mlp_norm_;
  torch::nn::Linear qkv_, attention_out_;  // queries, keys and values in one product
  torch::nn::Linear gate_up_, mlp_out_;    // both inputs of SwiGLU in one product
};
TORCH_MODULE(GPTBlock);

/// The model. Initialised as GPT-2: normal with deviation 0.02, and 0.02 / sqrt(2 * layers) where a block adds to the residual
/// stream. Equal seeds (torch::manual_seed) give equal models.
class GPTImpl : public torch::nn::Module {
 public:
  /// Throws c10::Error if the sizes do not fit each other.
  explicit GPTImpl(const GPTConfig& config);

  /// Logits [batch, time, vocab] of the tokens [batch, time] (int64) that follow.
  at::Tensor forward(const at::Tensor& tokens);
  /// Logits [batch, 1, vocab] of the token that follows `tokens`, which follow those in the cache: all of a beginning, or one more.
  at::Tensor next_logits(const at::Tensor& tokens, KeyValueCache& cache);
  /// Mean cross-entropy, in nats, of the targets [batch, time].
  at::Tensor loss(const at::Tensor& tokens, const at::Tensor& targets);

  const GPTConfig& config() const { return config_; }

 private:
  at::Tensor hidden(const at::Tensor& tokens, KeyValueCache* cache);
  at::Tensor logits(const at::Tensor& x);

  GPTConfig config_;
  torch::nn::Embedding embedding_;
  torch::nn::ModuleList blocks_;
  RMSNorm norm_;
  torch::nn::Linear head_{nullptr};  // empty if tied
  at::Tensor rotary_;                // [context, head_dim / 2, 2]: cosines and sines
};
TORCH_MODULE(GPT);
