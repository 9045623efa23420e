// Trains a GPT on text, sharded over processes: the project's main program. This file is the loop, to copy and change. What a program of
// yours would have of its own is in train_gpt/: options, the run's folder, log, progress, plot.

#include <fsdp/fsdp.h>    // sharding, optimizer, checkpoints, ranks on this machine
#include <torch/torch.h>  // the model

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <optional>
#include <stdexcept>
#include <string>

#include "corpus.h"                 // text as bytes, deterministic batches
#include "gpt.h"                    // the model, plain LibTorch
#include "train_gpt/evaluate.h"     // validation
#include "train_gpt/generate.h"     // text from the model
#include "train_gpt/model_setup.h"  // what options say about sharding, optimizer and schedule
#include "train_gpt/options.h"      // Options, their names on the command line, and which are refused
#include "train_gpt/report.h"       // log, progress on the terminal, plot
#include "train_gpt/run_folder.h"   // where all of that goes

namespace {

/// Set by Ctrl-C, and by SIGTERM, which Slurm and torchrun send some time before they kill.
volatile std::sig_atomic_t asked_to_end = 0;

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

/// Goes on from a checkpoint, if the options say so and there is one.
std::optional<fsdp::Loaded> resume(const Options& options, const RunFolder& run, GPT& model, fsdp::Optimizer& optimizer) {
  if (options.resume == "no") return std::nullopt;
  if (options.resume == "auto") return fsdp::load_latest(run.checkpoints(), *model, optimizer);
  return fsdp::load(options.resume, *model, optimizer);
}

int train(const Options& options, const Corpus& corpus) {
  for (const int signal : {SIGINT, SIGTERM}) std::signal(signal, [](int) { asked_to_end = 1; });
  at::set_num_threads(options.threads);
  const auto line = fsdp::init_device_mesh(options.device, {{"dp_shard", -1}});
  const auto run = open_run(options, line);
  if (!run) return kUsageExitCode;
  const auto mesh = options.outer == 1 ? line : fsdp::init_device_mesh(options.device, {{"dp_outer", options.outer}, {"dp_shard", -1}});
  torch::manual_seed(options.seed);
  GPT model(options.model);
  model->to(mesh.device());
  auto sharded = fsdp::fully_shard(*model, sharding_of(options, mesh));
  auto optimizer = optimizer_of(options, model);

  std::int64_t step = 0;
  double seconds_before = 0;  // of the runs that this one continues
  const auto loaded = resume(options, *run, model, optimizer);
  if (loaded) {
    step = std::get<std::int64_t>(loaded->extra.at("step"));
    seconds_before = std::get<double>(loaded->extra.at("seconds"));
  }
  Report report(options, *run, mesh, loaded);
  report.begin(model, corpus);

  const auto begin = std::chrono::steady_clock::now();
  const auto seconds_so_far = [&] { return seconds_before + seconds_since(begin); };
  std::optional<fsdp::AsyncSaver> saver;
  if (options.save_async) saver.emplace(*model, &optimizer);
  const auto save = [&](std::optional<double> validation) {
    const fsdp::ExtraState extra = {{"step", step}, {"seconds", seconds_so_far()}};
    const fsdp::SaveOptions how{.keep_last = options.keep_last, .keep_best = options.keep_last > 0 ? 1 : 0, .metric = validation};
    if (saver) {
      saver->save(run->checkpoint(step), extra, how);
    } else {
      fsdp::save(run->checkpoint(step), *model, optimizer, extra, how);
    }
  };
  // Progress in [0, 1]: by steps, or by rank 0's clock, which every rank must agree on.
  const auto done = [&] {
    if (options.steps > 0) return static_cast<double>(step) / static_cast<double>(options.steps);
    return std::min(1.0, mesh.sum(mesh.rank() == 0 ? seconds_so_far() / (60 * options.minutes) : 0.0));
  };

  const std::int64_t share = options.batch / mesh.size();
  const std::int64_t at_once = share / options.accumulate;
  std::optional<double> validation;  // after the last step, if that was a step to validate
  for (double progress = done(); progress < 1;) {
    const auto step_begin = std::chrono::steady_clock::now();
    optimizer.set_lr_factor(lr_factor(options, step, progress));
    double loss = 0;  // of this rank's share
    for (std::int64_t first = 0; first < share; first += at_once) {
      const auto batch = corpus.sample({.seed = options.seed, .step = step, .first = mesh.rank() * share + first, .count = at_once},
                                       options.model.context);
      const auto part =
          model->loss(batch.tokens.to(mesh.device()), batch.targets.to(mesh.device())) / static_cast<double>(options.accumulate);
      sharded.set_requires_gradient_sync(first + at_once == share);
      part.backward();
      loss += part.item<double>();
    }
    const double grad_norm = fsdp::clip_grad_norm(*model, options.clip);
    optimizer.step();
    optimizer.zero_grad();

    ++step;
    const double global_loss = mesh.sum(loss) / static_cast<double>(mesh.size());
    if (!std::isfinite(global_loss)) throw std::runtime_error("the loss of step " + std::to_string(step) + " is not finite; lower --lr");
    const double seconds = seconds_since(step_begin);
    progress = done();
    report.step({.step = step,
                 .loss = global_loss,
                 .grad_norm = grad_norm,
                 .lr = optimizer.lr(),
                 .tokens_per_second = static_cast<double>(options.batch * options.model.context) / seconds,
                 .peak_bytes = sharded.memory_stats().total.peak,
                 .done = progress,
                 .seconds_left = seconds_so_far() / progress * (1 - progress)});
    validation.reset();
    if (progress >= 1 || step % options.eval_every == 0) validation = evaluate(model, corpus, options, mesh);
    if (validation && progress < 1) report.validation(step, *validation);
    const bool ends = progress < 1 && mesh.sum(asked_to_end) > 0;  // One rank may have heard of it before the others.
    if (ends || validation || step % options.save_every == 0) save(validation);
    if (ends) {
      if (saver) saver->wait();
      report.interrupted(step);
      mesh.barrier();
      return 0;
    }
  }
  if (saver) saver->wait();
  const double seconds = seconds_so_far();
  if (!validation) validation = evaluate(model, corpus, options, mesh);
  report.finished({.step = step,
                   .seconds = seconds,
                   .validation = *validation,
                   .sample = generate(model, options, mesh),
                   .peak_bytes = sharded.memory_stats().total.peak});
  mesh.barrier();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  if (const auto exit_code = parse(argc, argv, options)) return *exit_code;
  if (!options.generate.empty()) return fsdp::launch_local(1, [&] { return generate_from_run(options); });
  const auto corpus = read_corpus(options);
  if (!corpus) return kUsageExitCode;
  std::signal(SIGINT, [](int) { std::raise(SIGTERM); });  // launch_local passes SIGTERM on to the ranks
  return fsdp::launch_local(options.nproc, [&] { return train(options, *corpus); });
}
