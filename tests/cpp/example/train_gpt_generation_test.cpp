#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "generation.h"
#include "gpt.h"

// Text with a cache of keys and values is the text without one, for the cost of one token each.
namespace fsdp {
namespace generation_test {

using Tokens = std::vector<std::int64_t>;

/// Deviations so large that every token, and its place, changes what follows.
GPT model_of(const GPTConfig& config) {
  torch::manual_seed(3);
  GPT model(config);
  const torch::NoGradGuard no_grad;
  for (auto& parameter : model->parameters()) {
    if (parameter.dim() == 2) parameter.normal_(0, 0.3);
  }
  return model;
}

/// Computes the whole window for each token.
Tokens without_cache(GPT& model, const Tokens& prompt, const GenerationOptions& options) {
  const torch::NoGradGuard no_grad;
  auto generator = at::detail::createCPUGenerator(options.seed);
  Tokens tokens = prompt;
  std::size_t begin = 0;
  while (tokens.size() < prompt.size() + static_cast<std::size_t>(options.tokens)) {
    const auto context = static_cast<std::size_t>(options.context);
    if (tokens.size() - begin > context) begin = tokens.size() - context / 2;
    const auto window = torch::tensor(Tokens(tokens.begin() + static_cast<std::ptrdiff_t>(begin), tokens.end())).unsqueeze(0);
    const auto logits = model->forward(window).select(1, window.size(1) - 1).view({-1}).to(at::kDouble);
    const auto next =
        options.temperature == 0 ? logits.argmax() : at::multinomial((logits / options.temperature).softmax(0), 1, false, generator);
    tokens.push_back(next.item<std::int64_t>());
  }
  return {tokens.begin() + static_cast<std::ptrdiff_t>(prompt.size()), tokens.end()};
}

TEST(Generation, EqualsTheOneWithoutACacheTokenByToken) {
  for (const bool tied : {false, true}) {
    const GPTConfig config{.vocab = 40, .dim = 16, .layers = 3, .heads = 2, .context = 24, .tied = tied};
    auto model = model_of(config);
    const NextLogits next_logits = [&](const at::Tensor& tokens, KeyValueCache& cache) { return model->next_logits(tokens, cache); };
    for (const double temperature : {0.0, 0.7}) {
      // A token, as many as the context takes, and more.
      for (const std::int64_t length : {1, 7, 24, 31}) {
        const auto drawn = torch::randint(config.vocab, {length}, at::kLong);
        const Tokens prompt(drawn.data_ptr<std::int64_t>(), drawn.data_ptr<std::int64_t>() + length);
        const GenerationOptions options{
            .layers = config.layers, .context = config.context, .tokens = 60, .temperature = temperature, .seed = 11};
        const auto found = generate_tokens(prompt, options, next_logits);
        EXPECT_EQ(found, without_cache(model, prompt, options)) << "temperature " << temperature << ", prompt of " << length;
        EXPECT_GT(std::set<std::int64_t>(found.begin(), found.end()).size(), 2U);
      }
    }
  }
}

TEST(Generation, LogitsAreThoseOfForward) {
  const GPTConfig config{.vocab = 40, .dim = 16, .layers = 3, .heads = 2, .context = 24};
  auto model = model_of(config);
  const torch::NoGradGuard no_grad;
  const auto tokens = torch::randint(config.vocab, {2, 24}, at::kLong);
  const auto expected = model->forward(tokens);
  KeyValueCache cache(config.layers, config.context);
  for (std::int64_t end = 5; end <= 24; ++end) {
    const auto begin = cache.length();
    const auto logits = model->next_logits(tokens.slice(1, begin, end), cache);
    EXPECT_LT((logits.select(1, 0) - expected.select(1, end - 1)).abs().max().item<double>(), 1e-5) << end;
  }
  EXPECT_THROW(model->next_logits(tokens.slice(1, 0, 1), cache), c10::Error);  // It is full.
  cache.clear();
  model->next_logits(tokens.slice(1, 0, 3), cache);
  EXPECT_THROW(model->next_logits(tokens.slice(1, 3, 5), cache), c10::Error);
}

TEST(Generation, EachTokenIsComputedOnceUntilTheContextIsFull) {
  std::vector<std::int64_t> computed;
  const NextLogits next_logits = [&](const at::Tensor& tokens, KeyValueCache& cache) {
    computed.push_back(tokens.size(1));
    const auto keys = at::zeros({1, 1, tokens.size(1), 2});
    cache.layer(0).append(keys, keys);
    return at::one_hot(at::tensor(static_cast<std::int64_t>(computed.size()) % 5), 5).to(at::kFloat);
  };
  const GenerationOptions options{.layers = 1, .context = 8, .tokens = 12, .temperature = 0};
  EXPECT_EQ(generate_tokens({0, 0, 0}, options, next_logits), (Tokens{1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2}));
  EXPECT_EQ(computed, (std::vector<std::int64_t>{3, 1, 1, 1, 1, 1, 4, 1, 1, 1, 1, 4}));

  computed.clear();
  EXPECT_EQ(generate_tokens({0}, {.layers = 1, .context = 8, .temperature = 0, .ends = {3}}, next_logits), (Tokens{1, 2}));
}

}  // namespace generation_test
}  // namespace fsdp
