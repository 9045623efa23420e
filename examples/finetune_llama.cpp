// Fine-tunes a Llama, Qwen2, Qwen3 or Mistral from a Hugging Face folder, sharded over processes, into another one.

#include <fsdp/fsdp.h>     // sharding, optimizer, checkpoints, ranks on this machine
#include <sys/resource.h>  // getrusage
#include <torch/torch.h>   // the model

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <stdexcept>
#include <string>

#include "llama/config.h"            // config.json
#include "llama/finetune_options.h"  // the command line
#include "llama/folder.h"            // safetensors into shards, and back
#include "llama/model.h"             // the model, plain LibTorch
#include "llama/tokens.h"            // the data, and the tokenizer

namespace {

using Options = llama::FinetuneOptions;

void check_ranks(const Options& options, std::int64_t ranks) {
  if (options.batch % ranks != 0) {
    throw std::runtime_error("--batch " + std::to_string(options.batch) + " does not divide over " + std::to_string(ranks) + " ranks");
  }
}

int train(const Options& options, const llama::Config& config, llama::Tokens tokens) {
  const auto mesh = fsdp::init_device_mesh(options.device, {{"dp_shard", -1}});
  check_ranks(options, mesh.size());
  auto model = llama::load_sharded(options.model, config, mesh, {.bf16 = options.dtype == "bf16", .recompute = options.recompute});
  fsdp::AdamW optimizer(*model, {.lr = options.lr, .betas = {0.9, 0.95}, .weight_decay = options.weight_decay});
  const auto schedule = fsdp::cosine_schedule(std::min(options.warmup, options.steps), options.steps, /*final_factor=*/0.1);
  const std::int64_t share = options.batch / mesh.size();  // sequences of each rank
  const bool speaks = mesh.rank() == 0;
  if (speaks) {
    std::printf("%lld tokens, %.2f epochs over %lld ranks\n", static_cast<long long>(tokens.size()),
                static_cast<double>(options.steps * options.batch) / static_cast<double>(tokens.sequences()),
                static_cast<long long>(mesh.size()));
  }

  std::int64_t step = 0;
  if (!options.checkpoints.empty()) {
    if (const auto loaded = fsdp::load_latest(options.checkpoints, *model, optimizer)) {
      step = loaded->get<std::int64_t>("step");
      if (speaks) std::printf("resumed from %s\n", loaded->path.c_str());
    }
  }
  while (step < options.steps) {
    optimizer.set_lr_factor(schedule(step));
    const auto batch = tokens.batch(step * options.batch + mesh.rank() * share, share, options.seed).to(mesh.device());
    const auto loss = model->loss(batch);
    loss.backward();
    const double norm = fsdp::clip_grad_norm(*model, options.clip);
    optimizer.step();
    optimizer.zero_grad();

    ++step;
    const double mean = mesh.sum(loss.item<double>()) / static_cast<double>(mesh.size());
    if (speaks) {
      std::printf("step %lld  loss %.4f  gradient norm %.3f\n", static_cast<long long>(step), mean, norm);
      std::fflush(stdout);  // at once, where it goes to a file as well
    }
    if (!options.checkpoints.empty() && (step % options.save_every == 0 || step == options.steps)) {
      fsdp::save(options.checkpoints + "/step-" + std::to_string(step), *model, optimizer, {{"step", step}}, {.keep_last = 2});
    }
  }
  rusage use{};
  getrusage(RUSAGE_SELF, &use);
  if (speaks) std::printf("peak resident memory of rank 0: %ld MiB\n", use.ru_maxrss / 1024);
  llama::write_folder(options.out, model, options.model, config, mesh);
  if (speaks) std::printf("written: %s\n", options.out.c_str());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  if (const auto exit_code = llama::parse(argc, argv, options)) return *exit_code;
  try {
    const auto config = llama::read_config(options.model);
    if (std::filesystem::exists(options.out)) throw std::runtime_error("--out " + options.out + " is there already");
    // Another launcher's number of ranks is known once they have met.
    if (!fsdp::is_launched()) check_ranks(options, options.nproc);
    const llama::Tokens tokens(options.data, options.model, options.context, config.vocab_size);
    return fsdp::launch_local(options.nproc, [&] { return train(options, config, tokens); });
  } catch (const std::exception& error) {
    std::cerr << "finetune_llama: " << error.what() << "\n";
    return 2;
  }
}
