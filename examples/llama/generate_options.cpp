#include "llama/generate_options.h"

#include <CLI/CLI.hpp>
#include <charconv>
#include <stdexcept>

namespace llama {
namespace {

void add_options(CLI::App& app, GenerateOptions& options) {
  const auto option = [&app](const char* name, auto& value, const char* help) {
    return app.add_option(name, value, help)->capture_default_str();
  };
  app.add_option("--model", options.model, "A Hugging Face folder: config.json and safetensors")->required();
  auto* prompt = app.add_option("--prompt", options.prompt, "What the text continues, for the tokenizer of --model");
  auto* tokens = app.add_option("--prompt-tokens", options.prompt_tokens, "The same as tokens (1,2,3); tokens are printed then, not text");
  tokens->delimiter(',')->excludes(prompt);
  app.add_option("--prompts", options.prompts,
                 "Read prompts from the standard input, one a line, as text or as tokens, and answer each. Weights that were written to "
                 "--model meanwhile are loaded before the next one")
      ->check(CLI::IsMember({"text", "tokens"}))
      ->excludes(prompt)
      ->excludes(tokens);
  option("--tokens", options.tokens, "To write at most")->check(CLI::NonNegativeNumber);
  option("--temperature", options.temperature, "Lower is more repetitive, higher is wilder; 0: always the likeliest token")
      ->check(CLI::NonNegativeNumber);
  option("--seed", options.seed, "Of the draws");
  option("--device", options.device, "Where to compute")->check(CLI::IsMember({"cpu", "cuda"}));
}

}  // namespace

std::optional<int> parse(int argc, char** argv, GenerateOptions& options) {
  CLI::App app("Writes text by a Llama, Qwen2, Qwen3 or Mistral from a Hugging Face folder.", "generate_llama");
  add_options(app, options);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  }
  return std::nullopt;
}

std::vector<std::int32_t> tokens_of(const std::string& line) {
  std::vector<std::int32_t> tokens;
  const char* end = line.data() + line.size();
  for (const char* at = line.data(); at < end; ++at) {
    const auto [stop, error] = std::from_chars(at, end, tokens.emplace_back());
    if (error != std::errc() || (stop != end && *stop != ',')) throw std::runtime_error("'" + line + "' is no list of tokens (1,2,3)");
    at = stop;
  }
  return tokens;
}

}  // namespace llama
