// Writes text by a model of the Llama family (Llama, Qwen2, Qwen3, Mistral) from a Hugging Face folder, such as finetune_llama has written.

#include <fsdp/fsdp.h>    // safetensors
#include <torch/torch.h>  // the model

#include <CLI/CLI.hpp>  // the command line
#include <algorithm>
#include <iostream>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "generation.h"       // token after token, with a cache of keys and values
#include "llama/config.h"     // config.json
#include "llama/folder.h"     // safetensors
#include "llama/model.h"      // the model, plain LibTorch
#include "llama/tokenizer.h"  // text to tokens, and back

namespace {

struct Options {
  std::string model, prompt, device = "cpu";
  std::vector<std::int32_t> prompt_tokens;
  std::int64_t tokens = 100;
  double temperature = 0.8;
  std::uint64_t seed = 1;
};

void check_prompt(const std::vector<std::int32_t>& prompt, const llama::Config& config) {
  if (prompt.empty()) throw std::runtime_error("the model needs a token to begin with: give --prompt or --prompt-tokens");
  for (const auto token : prompt) {
    if (token < 0 || token >= config.vocab_size) {
      throw std::runtime_error("the prompt has the token " + std::to_string(token) + ", and the model has " +
                               std::to_string(config.vocab_size) + " of them");
    }
  }
}

/// The prompt and what follows it.
std::vector<std::int32_t> generate(const Options& options, const llama::Config& config, const std::vector<std::int32_t>& prompt,
                                   const std::vector<std::int32_t>& ends) {
  const auto mesh = fsdp::init_device_mesh(options.device, {{"dp_shard", -1}});
  auto model = llama::load_whole(options.model, config, mesh);
  const auto size = static_cast<std::int64_t>(prompt.size());
  const GenerationOptions how{.layers = config.num_hidden_layers,
                              .context = std::min(config.longest, size + options.tokens),
                              .tokens = options.tokens,
                              .temperature = options.temperature,
                              .seed = options.seed,
                              .ends = {ends.begin(), ends.end()}};
  const auto next_logits = [&](const at::Tensor& tokens, KeyValueCache& cache) {
    return model->next_logits(tokens.to(mesh.device()), cache);
  };
  std::vector<std::int32_t> tokens = prompt;
  for (const auto token : generate_tokens({prompt.begin(), prompt.end()}, how, next_logits)) tokens.push_back(static_cast<int>(token));
  return tokens;
}

void add_options(CLI::App& app, Options& options) {
  const auto option = [&app](const char* name, auto& value, const char* help) {
    return app.add_option(name, value, help)->capture_default_str();
  };
  app.add_option("--model", options.model, "A Hugging Face folder: config.json and safetensors")->required();
  auto* prompt = app.add_option("--prompt", options.prompt, "What the text continues, for the tokenizer of --model");
  app.add_option("--prompt-tokens", options.prompt_tokens, "The same as tokens (1,2,3); tokens are printed then, not text")
      ->delimiter(',')
      ->excludes(prompt);
  option("--tokens", options.tokens, "To write at most")->check(CLI::NonNegativeNumber);
  option("--temperature", options.temperature, "Lower is more repetitive, higher is wilder; 0: always the likeliest token")
      ->check(CLI::NonNegativeNumber);
  option("--seed", options.seed, "Of the draws");
  option("--device", options.device, "Where to compute")->check(CLI::IsMember({"cpu", "cuda"}));
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("Writes text by a Llama, Qwen2, Qwen3 or Mistral from a Hugging Face folder.", "generate_llama");
  add_options(app, options);
  CLI11_PARSE(app, argc, argv);
  try {
    const auto config = llama::read_config(options.model);
    std::optional<llama::Tokenizer> tokenizer;
    if (options.prompt_tokens.empty()) tokenizer.emplace(options.model);
    const auto prompt = tokenizer ? tokenizer->encode(options.prompt) : options.prompt_tokens;
    check_prompt(prompt, config);
    auto ends = tokenizer ? tokenizer->ends() : std::vector<std::int32_t>{};
    ends.insert(ends.end(), config.eos_token_ids.begin(), config.eos_token_ids.end());
    return fsdp::launch_local(1, [&] {
      const auto tokens = generate(options, config, prompt, ends);
      if (tokenizer) {
        std::cout << printable(tokenizer->decode(tokens)) << std::endl;
      } else {
        for (std::size_t i = 0; i < tokens.size(); ++i) std::cout << (i > 0 ? "," : "") << tokens[i];
        std::cout << std::endl;
      }
      return 0;
    });
  } catch (const std::exception& error) {
    std::cerr << "generate_llama: " << error.what() << "\n";
    return 2;
  }
}
