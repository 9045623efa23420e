#include "train_gpt/generate.h"

#include <fsdp/fsdp.h>
#include <torch/torch.h>

#include <iostream>
#include <utility>
#include <vector>

#include "corpus.h"
#include "generation.h"
#include "train_gpt/run_folder.h"

std::string generate(GPT& model, const Options& options, const fsdp::DeviceMesh& mesh) {
  const fsdp::SummonFullParams whole(*model, {.writeback = false, .rank0_only = true});
  if (mesh.rank() != 0) return "";
  std::vector<std::int64_t> prompt{Corpus::kStart};
  for (const char c : options.prompt) prompt.push_back(static_cast<std::uint8_t>(c));
  const GenerationOptions how{.layers = options.model.layers,
                              .context = options.model.context,
                              .tokens = options.sample_tokens,
                              .temperature = options.temperature,
                              .seed = options.seed,
                              .ends = {Corpus::kStart}};  // where the next file would begin
  const auto next_logits = [&](const at::Tensor& tokens, KeyValueCache& cache) {
    return model->next_logits(tokens.to(mesh.device()), cache);
  };
  std::string text = options.prompt;
  for (const auto token : generate_tokens(std::move(prompt), how, next_logits)) text.push_back(static_cast<char>(token));
  return text;
}

int generate_from_run(const Options& options, const fsdp::DeviceMesh& mesh) {
  at::set_num_threads(options.threads);
  const auto folder = checkpoints_of(options, options.generate);
  auto checkpoint = options.newest ? std::nullopt : fsdp::best(folder);
  if (!checkpoint) checkpoint = fsdp::latest(folder);
  if (!nobody_refuses(mesh, checkpoint ? "" : "there is no checkpoint in " + folder)) return kUsageExitCode;
  GPT model(options.model);
  model->to(mesh.device());
  fsdp::fully_shard(*model, {.mesh = mesh, .units = fsdp::each<GPTBlockImpl>()});
  fsdp::load(*checkpoint, *model);
  const auto text = generate(model, options, mesh);
  if (mesh.rank() == 0) {
    std::cerr << "text from " << *checkpoint << std::endl;
    std::cout << printable(text) << std::endl;
  }
  mesh.barrier();
  return 0;
}
