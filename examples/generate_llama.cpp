// Writes text by a model of the Llama family (Llama, Qwen2, Qwen3, Mistral) from a Hugging Face folder, such as finetune_llama has written.
// With --prompts it goes on, and has the weights that are in the folder when a prompt comes.

#include <fsdp/fsdp.h>    // safetensors
#include <torch/torch.h>  // the model

#include <algorithm>
#include <iostream>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "generation.h"              // token after token, with a cache of keys and values
#include "llama/config.h"            // config.json
#include "llama/generate_options.h"  // the command line
#include "llama/latest_model.h"      // safetensors, loaded again when they have changed
#include "llama/model.h"             // the model, plain LibTorch
#include "llama/tokenizer.h"         // text to tokens, and back

namespace {

using Options = llama::GenerateOptions;

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
std::vector<std::int32_t> generate(const Options& options, const llama::Config& config, llama::Model& model,
                                   const std::vector<std::int32_t>& prompt, const std::vector<std::int32_t>& ends) {
  check_prompt(prompt, config);
  const auto size = static_cast<std::int64_t>(prompt.size());
  const GenerationOptions how{.layers = config.num_hidden_layers,
                              .context = std::min(config.longest, size + options.tokens),
                              .tokens = options.tokens,
                              .temperature = options.temperature,
                              .seed = options.seed,
                              .ends = {ends.begin(), ends.end()}};
  const auto next_logits = [&](const at::Tensor& tokens, KeyValueCache& cache) {
    return model->next_logits(tokens.to(model->parameters().front().device()), cache);
  };
  std::vector<std::int32_t> tokens = prompt;
  for (const auto token : generate_tokens({prompt.begin(), prompt.end()}, how, next_logits)) tokens.push_back(static_cast<int>(token));
  return tokens;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  if (const auto exit_code = llama::parse(argc, argv, options)) return *exit_code;
  try {
    const auto config = llama::read_config(options.model);
    std::optional<llama::Tokenizer> tokenizer;
    if (options.prompt_tokens.empty() && options.prompts != "tokens") tokenizer.emplace(options.model);
    const auto prompt = tokenizer ? tokenizer->encode(options.prompt) : options.prompt_tokens;
    if (options.prompts.empty()) check_prompt(prompt, config);
    auto ends = tokenizer ? tokenizer->ends() : std::vector<std::int32_t>{};
    ends.insert(ends.end(), config.eos_token_ids.begin(), config.eos_token_ids.end());
    return fsdp::launch_local(1, [&] {
      llama::LatestModel model(options.model, config, fsdp::init_device_mesh(options.device, {{"dp_shard", -1}}));
      model.get();  // What is wrong with the folder is known before the first prompt.
      const auto answer = [&](const std::vector<std::int32_t>& to) {
        const auto tokens = generate(options, config, model.get(), to, ends);
        if (tokenizer) std::cout << printable(tokenizer->decode(tokens));
        for (std::size_t i = 0; !tokenizer && i < tokens.size(); ++i) std::cout << (i > 0 ? "," : "") << tokens[i];
        std::cout << std::endl;
      };
      if (options.prompts.empty()) answer(prompt);
      for (std::string line; !options.prompts.empty() && std::getline(std::cin, line);) {
        try {
          answer(tokenizer ? tokenizer->encode(line) : llama::tokens_of(line));
        } catch (const std::runtime_error& error) {
          std::cerr << "no answer: " << error.what() << std::endl;
        }
      }
      return 0;
    });
  } catch (const std::exception& error) {
    std::cerr << "generate_llama: " << error.what() << "\n";
    return 2;
  }
}
