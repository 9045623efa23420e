#include "generation.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

namespace {

std::int64_t draw(const at::Tensor& logits, double temperature, at::Generator& generator) {
  if (temperature == 0) return logits.argmax().item<std::int64_t>();
  return at::multinomial((logits / temperature).softmax(0), 1, false, generator).item<std::int64_t>();
}

}  // namespace

std::vector<std::int64_t> generate_tokens(std::vector<std::int64_t> prompt, const GenerationOptions& options, const NextLogits& logits_of) {
  const at::NoGradGuard no_grad;
  auto generator = at::detail::createCPUGenerator(options.seed);
  KeyValueCache cache(options.layers, options.context);
  std::vector<std::int64_t> tokens = std::move(prompt);
  const auto begin = static_cast<std::ptrdiff_t>(tokens.size());
  auto unseen = static_cast<std::int64_t>(tokens.size());  // the last ones, which are not in the cache
  for (std::int64_t i = 0; i < options.tokens; ++i) {
    if (cache.length() + unseen > options.context) {
      cache.clear();
      unseen = options.context / 2;
    }
    const auto input = at::tensor(std::vector<std::int64_t>(tokens.end() - unseen, tokens.end())).view({1, unseen});
    const auto next = draw(logits_of(input, cache).view({-1}).to(at::kCPU, at::kDouble), options.temperature, generator);
    if (std::find(options.ends.begin(), options.ends.end(), next) != options.ends.end()) break;
    tokens.push_back(next);
    unseen = 1;
  }
  return {tokens.begin() + begin, tokens.end()};
}

std::string printable(std::string text) {
  const auto is_control = [](unsigned char c) { return (c < 0x20 && c != '\n' && c != '\t') || c == 0x7f; };
  std::replace_if(text.begin(), text.end(), is_control, '?');
  return text;
}
