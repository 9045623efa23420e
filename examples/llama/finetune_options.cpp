#include "llama/finetune_options.h"

#include <CLI/CLI.hpp>

namespace llama {
namespace {

void add_options(CLI::App& app, FinetuneOptions& options) {
  const auto option = [&app](const char* name, auto& value, const char* help) {
    return app.add_option(name, value, help)->capture_default_str();
  };
  app.option_defaults()->take_last();  // so that a script can append what differs
  app.add_option("--model", options.model, "A Hugging Face folder: config.json and safetensors")->required();
  app.add_option("--data", options.data, "A text file, for the tokenizer of --model; or *.bin: int32 tokens")->required();
  app.add_option("--out", options.out, "The new folder for the fine-tuned model, which transformers loads")->required();
  option("--nproc", options.nproc, "Ranks to start on this machine; ignored under another launcher")->check(CLI::PositiveNumber);
  option("--device", options.device, "Where to train")->check(CLI::IsMember({"cpu", "cuda"}));
  option("--steps", options.steps, "Updates")->check(CLI::PositiveNumber);
  option("--batch", options.batch, "Sequences per step, over all ranks")->check(CLI::PositiveNumber);
  option("--context", options.context, "Tokens per sequence")->check(CLI::PositiveNumber);
  option("--warmup", options.warmup, "Steps until the learning rate peaks")->check(CLI::NonNegativeNumber);
  option("--lr", options.lr, "Of AdamW at its peak")->check(CLI::PositiveNumber);
  option("--weight-decay", options.weight_decay, "Of all parameters")->check(CLI::NonNegativeNumber);
  option("--clip", options.clip, "Largest norm of the gradients")->check(CLI::PositiveNumber);
  option("--seed", options.seed, "Of the order of the sequences");
  option("--dtype", options.dtype, "In which the model computes; the optimizer's parameters stay fp32")
      ->check(CLI::IsMember({"fp32", "bf16"}));
  app.add_flag("--recompute", options.recompute, "Compute layers twice instead of keeping their activations");
  app.add_option("--checkpoints", options.checkpoints, "A folder to save to, and to resume from");
  option("--save-every", options.save_every, "Steps between checkpoints")->check(CLI::PositiveNumber);
}

}  // namespace

std::optional<int> parse(int argc, char** argv, FinetuneOptions& options) {
  CLI::App app("Fine-tunes a Llama, Qwen2, Qwen3 or Mistral from a Hugging Face folder, sharded over processes.", "finetune_llama");
  add_options(app, options);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  }
  return std::nullopt;
}

}  // namespace llama
