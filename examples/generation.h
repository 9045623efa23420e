#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "key_value_cache.h"

// Text from a model of the next token, whatever the model is.

struct GenerationOptions {
  std::int64_t layers = 0;    ///< Of the model.
  std::int64_t context = 0;   ///< The longest sequence that the model takes; at least 2.
  std::int64_t tokens = 100;  ///< To generate at most.
  double temperature = 0.8;   ///< Of the distribution that tokens are drawn from: lower is more repetitive. 0: always the likeliest token.
  std::uint64_t seed = 1;     ///< Of the draws.
  std::vector<std::int64_t> ends = {};  ///< Tokens after which nothing follows.
};

/// Logits of the token after `tokens` ([1, time], int64, on the CPU), which follow those in the cache: any shape of one row. Adds `tokens`
/// to the cache.
using NextLogits = std::function<at::Tensor(const at::Tensor& tokens, KeyValueCache& cache)>;

/// The tokens that follow `prompt`, which has one at least; without that which ends the text. The prompt is computed at once, and then each
/// token alone, until the context is full: then its second half is computed again, and is the beginning of what follows.
std::vector<std::int64_t> generate_tokens(std::vector<std::int64_t> prompt, const GenerationOptions& options, const NextLogits& logits_of);

/// Control characters could do anything to a terminal, and an untrained model writes them.
std::string printable(std::string text);
