#include "train_gpt/generate.h"

#include <fsdp/fsdp.h>
#include <torch/torch.h>

#include <algorithm>
#include <iostream>
#include <vector>

#include "corpus.h"
#include "train_gpt/run_folder.h"

std::string generate(GPT& model, const Options& options, const fsdp::DeviceMesh& mesh) {
  const torch::NoGradGuard no_grad;
  const fsdp::SummonFullParams whole(*model, {.writeback = false, .rank0_only = true});
  if (mesh.rank() != 0) return "";
  auto generator = at::detail::createCPUGenerator(options.seed);
  std::string text = options.prompt;
  std::vector<std::int64_t> tokens{Corpus::kStart};
  for (const char c : text) tokens.push_back(static_cast<std::uint8_t>(c));
  for (std::int64_t i = 0; i < options.sample_tokens; ++i) {
    const auto length = std::min<std::int64_t>(static_cast<std::int64_t>(tokens.size()), options.model.context);
    const auto window = torch::tensor(std::vector<std::int64_t>(tokens.end() - length, tokens.end())).view({1, length});
    const auto logits = model->forward(window.to(mesh.device())).select(1, length - 1).view({-1}).to(at::kCPU, at::kDouble);
    const auto next = at::multinomial((logits / options.temperature).softmax(0), 1, false, generator).item<std::int64_t>();
    if (next == Corpus::kStart) break;  // the end of a file
    tokens.push_back(next);
    text.push_back(static_cast<char>(next));
  }
  return text;
}

int generate_from_run(const Options& options) {
  at::set_num_threads(options.threads);
  const auto folder = checkpoints_of(options, options.generate);
  const auto checkpoint = fsdp::latest(folder);
  if (!checkpoint) {
    std::cerr << "train_gpt: there is no checkpoint in " << folder << std::endl;
    return kUsageExitCode;
  }
  const auto mesh = fsdp::init_device_mesh(options.device, {{"dp_shard", -1}});
  GPT model(options.model);
  model->to(mesh.device());
  fsdp::fully_shard(*model, {.mesh = mesh, .units = fsdp::each<GPTBlockImpl>()});
  fsdp::load(*checkpoint, *model);
  const auto text = generate(model, options, mesh);
  if (mesh.rank() == 0) std::cout << printable(text) << std::endl;
  mesh.barrier();
  return 0;
}

std::string printable(std::string text) {
  const auto is_control = [](unsigned char c) { return (c < 0x20 && c != '\n' && c != '\t') || c == 0x7f; };
  std::replace_if(text.begin(), text.end(), is_control, '?');
  return text;
}
