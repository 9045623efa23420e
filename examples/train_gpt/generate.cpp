#include "train_gpt/generate.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <fsdp/fsdp.h>

#include <chrono>
#include <iostream>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "corpus.h"
#include "generation.h"
#include "train_gpt/run_folder.h"

void Writer::take_weights(GPT& model) {
  if (mesh_.rank() == 0 && !copy_) {
    copy_.emplace(options_.model);
    (*copy_)->to(mesh_.device());
  }
  std::map<std::string, at::Tensor> own;
  if (copy_) {
    for (const auto& parameter : (*copy_)->named_parameters()) own[parameter.key()] = parameter.value();
    for (const auto& buffer : (*copy_)->named_buffers()) own[buffer.key()] = buffer.value();
  }
  const at::NoGradGuard no_grad;
  for (const auto& bucket : fsdp::full_weights(*model, {.ranks = fsdp::WeightReceivers::kFirst})) {
    for (const auto& [name, weight] : bucket.weights) own.at(name).copy_(weight);  // on other ranks, none come
  }
}

std::string Writer::text() {
  std::vector<std::int64_t> prompt{Corpus::kStart};
  for (const char c : options_.prompt) prompt.push_back(static_cast<std::uint8_t>(c));
  const GenerationOptions how{.layers = options_.model.layers,
                              .context = options_.model.context,
                              .tokens = options_.sample_tokens,
                              .temperature = options_.temperature,
                              .seed = options_.seed,
                              .ends = {Corpus::kStart}};  // where the next file would begin
  const auto next_logits = [&](const at::Tensor& tokens, KeyValueCache& cache) {
    return (*copy_)->next_logits(tokens.to(mesh_.device()), cache);
  };
  std::string text = options_.prompt;
  for (const auto token : generate_tokens(std::move(prompt), how, next_logits)) text.push_back(static_cast<char>(token));
  return text;
}

void Writer::report_text(Report& report) { report.sample(step_, written_.get()); }

void Writer::after_step(std::int64_t step, GPT& model, Report& report) {
  if (written_.valid() && written_.wait_for(std::chrono::seconds(0)) == std::future_status::ready) report_text(report);
  if (options_.sample_every == 0 || step % options_.sample_every != 0) return;
  if (written_.valid()) report_text(report);
  take_weights(model);
  step_ = step;
  if (!copy_) return;
  written_ = std::async(std::launch::async, [this] {
    at::set_num_threads(options_.threads);  // It is a thread's own setting.
    return text();
  });
}

std::string Writer::write(GPT& model, Report* report) {
  if (written_.valid() && report != nullptr) report_text(*report);
  take_weights(model);
  return copy_ ? text() : "";
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
  const auto text = Writer(options, mesh).write(model);
  if (mesh.rank() == 0) {
    std::cerr << "text from " << *checkpoint << std::endl;
    std::cout << printable(text) << std::endl;
  }
  mesh.barrier();
  return 0;
}
