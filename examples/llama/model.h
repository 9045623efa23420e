#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <optional>

#include "key_value_cache.h"
#include "llama/config.h"
#include "llama/rotary.h"

// Llama, Qwen2, Qwen3 and Mistral in plain LibTorch: what transformers calls LlamaForCausalLM, with the same names of parameters. It knows
// nothing about sharding, and computes in the dtype of its parameters.

namespace llama {

/// Which tokens one sees: all that came before, or the last `window` of them, itself among them.
struct Sight {
  std::optional<std::int64_t> window;
  at::Tensor mask;  ///< Of the tokens of a beginning, [time, time], where some have more than the window before them.
};

/// Root-mean-square norm with a learned scale (Zhang and Sennrich, 2019).
class RMSNormImpl : public torch::nn::Module {
 public:
  RMSNormImpl(std::int64_t width, double eps);
  at::Tensor forward(const at::Tensor& x);

  at::Tensor weight;

 private:
  double eps_;
};
TORCH_MODULE(RMSNorm);

/// Causal self-attention, in which groups of query heads share a head of keys and values (Ainslie et al., 2023).
class AttentionImpl : public torch::nn::Module {
 public:
  explicit AttentionImpl(const Config& config);
  /// x is [batch, time, hidden_size]; its tokens follow those in the cache, if there is one.
  at::Tensor forward(const at::Tensor& x, const Rotary& rotary, const Sight& sight, LayerCache* cache);

 private:
  std::int64_t head_dim_;
  torch::nn::Linear q_proj_, k_proj_, v_proj_, o_proj_;
  RMSNorm q_norm_{nullptr}, k_norm_{nullptr};  // empty without qk_norm
};
TORCH_MODULE(Attention);

/// SwiGLU (Shazeer, 2020).
class MLPImpl : public torch::nn::Module {
 public:
  explicit MLPImpl(const Config& config);
  at::Tensor forward(const at::Tensor& x);

 private:
  torch::nn::Linear gate_proj_, up_proj_, down_proj_;
};
TORCH_MODULE(MLP);

/// One layer: attention and SwiGLU, each behind a norm and around a residual. The unit of sharding.
class LayerImpl : public torch::nn::Module {
 public:
  explicit LayerImpl(const Config& config);
  at::Tensor forward(const at::Tensor& x, const Rotary& rotary, const Sight& sight, LayerCache* cache);

 private:
  Attention self_attn_;
  MLP mlp_;
  RMSNorm input_layernorm_, post_attention_layernorm_;
};
TORCH_MODULE(Layer);

/// Embedding, layers and the last norm: the submodule that transformers calls "model".
class BodyImpl : public torch::nn::Module {
 public:
  BodyImpl(const Config& config, bool recompute);
  /// `length` is the whole sequence's, by which some rotary embeddings are stretched.
  at::Tensor forward(const at::Tensor& tokens, KeyValueCache* cache, std::int64_t length);

  torch::nn::Embedding embed_tokens;

 private:
  Config config_;
  bool recompute_;
  torch::nn::ModuleList layers_;
  RMSNorm norm_;
};
TORCH_MODULE(Body);

/// The whole model, for which values are to be loaded: those of its constructor are LibTorch's defaults.
class ModelImpl : public torch::nn::Module {
 public:
  /// With `recompute`, layers compute again in backward instead of keeping their activations.
  explicit ModelImpl(const Config& config, bool recompute = false);

  /// Logits [batch, time, vocab_size] of the tokens (int64) that follow tokens [batch, time].
  at::Tensor forward(const at::Tensor& tokens);
  /// Logits [batch, 1, vocab_size] of the token that follows `tokens`, which follow those in the cache: all of a beginning, or one more.
  at::Tensor next_logits(const at::Tensor& tokens, KeyValueCache& cache);
  /// Mean cross-entropy, in nats, of each of the tokens [batch, time + 1] but the first, given those before. transformers' own, where
  /// labels are the tokens.
  at::Tensor loss(const at::Tensor& tokens);

 private:
  Body model_;
  torch::nn::Linear lm_head_;
};
TORCH_MODULE(Model);

}  // namespace llama
