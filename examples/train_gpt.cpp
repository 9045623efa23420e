// Trains a GPT on text, sharded over processes: the project's main program. This file is the loop, to copy and change. What a program of
// yours would have of its own is in train_gpt/: options, the run's folder, log, progress, plot.

#include <ATen/Context.h>   // the random seed
#include <ATen/Parallel.h>  // threads
#include <fsdp/fsdp.h>      // sharding, optimizer, checkpoints, ranks on this machine

#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>
#include <stdexcept>
#include <string>

#include "corpus.h"                 // text as bytes, deterministic batches
#include "gpt.h"                    // the model, plain LibTorch
#include "train_gpt/evaluate.h"     // validation
#include "train_gpt/generate.h"     // text from the model
#include "train_gpt/model_setup.h"  // what options say about sharding, optimizer and schedule
#include "train_gpt/options.h"      // Options, their names on the command line, and which are refused
#include "train_gpt/program.h"      // what comes before the ranks train
#include "train_gpt/report.h"       // log, progress on the terminal, plot
#include "train_gpt/resume.h"       // going on from a checkpoint
#include "train_gpt/run_folder.h"   // where all of that goes

namespace {

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

int train(const Options& options, const Corpus& corpus, const fsdp::DeviceMesh& line) {
  at::set_num_threads(options.threads);
  std::optional<RunFolder> run;
  const auto open_run = [&] {
    validate_ranks(options, line.size());
    run.emplace(options, line);
  };
  if (!all_accept(line, open_run)) return kUsageExitCode;
  const auto mesh = options.outer == 1 ? line : fsdp::init_device_mesh(options.device, {{"dp_outer", options.outer}, {"dp_shard", -1}});
  at::manual_seed(options.seed);
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
  const auto begin = std::chrono::steady_clock::now();
  const auto seconds_so_far = [&] { return seconds_before + seconds_since(begin); };
  std::optional<fsdp::AsyncSaver> saver;
  const bool in_memory = !options.memory.empty();
  if (options.save_async || in_memory) saver.emplace(*model, &optimizer, fsdp::AsyncSaverOptions{.memory = options.memory});
  const auto extra_now = [&] { return fsdp::ExtraState{{"step", step}, {"seconds", seconds_so_far()}}; };
  const auto save = [&](std::optional<double> validation) {
    const auto extra = extra_now();
    const fsdp::SaveOptions how{.keep_last = options.keep_last, .keep_best = options.keep_last > 0 ? 1 : 0, .metric = validation};
    if (saver) {
      saver->save(run->checkpoint(step), extra, how);
    } else {
      fsdp::save(run->checkpoint(step), *model, optimizer, extra, how);
    }
  };
  // Progress in [0, 1]: by steps, and where time is limited by rank 0's clock, which every rank must agree on.
  const auto done = [&] {
    const double by_steps = options.steps > 0 ? static_cast<double>(step) / static_cast<double>(options.steps) : 0.0;
    const double by_time = options.minutes > 0 ? mesh.sum(mesh.rank() == 0 ? seconds_so_far() / (60 * options.minutes) : 0.0) : 0.0;
    return std::min(1.0, std::max(by_steps, by_time));
  };
  if (loaded && done() >= 1) {
    say_nothing_is_left(options, mesh, loaded->path, step);
    mesh.barrier();
    return 0;
  }
  if (!all_accept(mesh, [&] { run->begin(options, mesh); })) return kUsageExitCode;
  fsdp::stop_requested(mesh);  // From here on a signal ends the run after a step, with a checkpoint.
  Report report(options, *run, mesh, loaded);
  report.begin(model, corpus);
  Writer writer(options, mesh);

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
    if (progress < 1) writer.after_step(step, model, report);
    validation.reset();
    if (progress >= 1 || step % options.eval_every == 0) {
      report.times(step, fsdp::step_report(sharded, options.eval_every));
      validation = evaluate(model, corpus, options, mesh);
    }
    if (validation && progress < 1) report.validation(step, *validation);
    const bool ends = progress < 1 && fsdp::stop_requested(mesh);  // Ctrl-C, or SIGTERM, which Slurm sends some time before it kills
    if (ends || validation || step % options.save_every == 0) {
      save(validation);
    } else if (in_memory && step % options.memory_every == 0) {
      saver->save_in_memory("step-" + std::to_string(step), extra_now());
      if (options.memory_wait) saver->wait_for_memory();
    }
    if (ends) {
      if (saver) saver->remove_memory();  // waits for the disk, from which a run that was stopped goes on
      report.timeline();
      report.interrupted(step);
      mesh.barrier();
      return 0;
    }
  }
  if (saver) saver->remove_memory();
  report.timeline();
  const double seconds = seconds_so_far();
  if (!validation) validation = evaluate(model, corpus, options, mesh);
  report.finished({.step = step,
                   .seconds = seconds,
                   .validation = *validation,
                   .sample = writer.write(model, &report),
                   .peak_bytes = sharded.memory_stats().total.peak});
  mesh.barrier();
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return run_program(argc, argv, train); }
