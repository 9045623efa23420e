// Trains a GPT on text, sharded over processes: the project's main program.

#include <fsdp/fsdp.h>    // sharding, optimizer, ranks on this machine
#include <torch/torch.h>  // the model
#include <unistd.h>       // isatty

#include <CLI/CLI.hpp>  // the command line
#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>  // the log
#include <numbers>
#include <optional>
#include <string>
#include <utility>

#include "corpus.h"             // text as bytes, deterministic batches
#include "gpt.h"                // the model, plain LibTorch
#include "train_gpt_options.h"  // Options, their names on the command line, and which are refused

namespace {

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

/// Validation loss in bits per byte over evenly spread sequences, each rank a share.
double evaluate(GPT& model, const Corpus& corpus, const Options& options, const fsdp::DeviceMesh& mesh) {
  const torch::NoGradGuard no_grad;
  const std::int64_t share = (options.eval_sequences + mesh.size() - 1) / mesh.size();
  const std::int64_t total = share * mesh.size();
  double nats = 0;
  for (std::int64_t i = 0; i < share; i += 8) {
    const std::int64_t count = std::min<std::int64_t>(8, share - i);
    const auto batch = corpus.validation_batch(mesh.rank() * share + i, count, total, options.model.context);
    nats += model->loss(batch.tokens.to(mesh.device()), batch.targets.to(mesh.device())).item<double>() * static_cast<double>(count);
  }
  return mesh.sum(nats) / static_cast<double>(total) / std::log(2.0);
}

/// What the model writes after the prompt. Collective, as the parameters are sharded; rank 0 draws each token for all, as processors of
/// different kinds round differently.
std::string sample(GPT& model, const Options& options, const fsdp::DeviceMesh& mesh) {
  const torch::NoGradGuard no_grad;
  auto generator = at::detail::createCPUGenerator(options.seed);
  std::string text = options.prompt.value_or("");
  std::vector<std::int64_t> tokens{Corpus::kStart};
  for (const char c : text) tokens.push_back(static_cast<std::uint8_t>(c));
  for (std::int64_t i = 0; i < options.sample_tokens; ++i) {
    const auto length = std::min<std::int64_t>(static_cast<std::int64_t>(tokens.size()), options.model.context);
    const auto window = torch::tensor(std::vector<std::int64_t>(tokens.end() - length, tokens.end())).view({1, length});
    const auto logits = model->forward(window.to(mesh.device())).select(1, length - 1).view({-1}).to(at::kCPU, at::kDouble);
    const auto drawn = at::multinomial((logits / options.temperature).softmax(0), 1, false, generator).item<double>();
    const auto next = static_cast<std::int64_t>(mesh.sum(mesh.rank() == 0 ? drawn : 0.0));
    if (next == Corpus::kStart) break;  // the end of a file
    tokens.push_back(next);
    text.push_back(static_cast<char>(next));
  }
  return text;
}

/// Control characters could do anything to a terminal, and an untrained model writes them.
std::string printable(std::string text) {
  const auto is_control = [](unsigned char c) { return (c < 0x20 && c != '\n' && c != '\t') || c == 0x7f; };
  std::replace_if(text.begin(), text.end(), is_control, '?');
  return text;
}

/// Progress on the terminal and in the JSON-lines log; on rank 0 only.
class Reporter {
 public:
  Reporter(const Options& options, bool enabled) : enabled_(enabled), terminal_(isatty(STDOUT_FILENO) != 0) {
    if (enabled_ && !options.log.empty()) log_.open(options.log);
  }

  void step(const nlohmann::json& row, double seconds_left) {
    if (!enabled_) return;
    write(row);
    if (!terminal_ && seconds_since(shown_) < 5 && row["step"] != 1) return;
    shown_ = std::chrono::steady_clock::now();
    line_open_ = terminal_;
    std::printf("%sstep %5d  loss %.4f  %7.0f tokens/s  lr %.2e  peak %6.1f MiB  %3.0f s left%s", terminal_ ? "\r" : "",
                row["step"].get<int>(), row["loss"].get<double>(), row["tokens_per_second"].get<double>(), row["lr"].get<double>(),
                row["peak_mib"].get<double>(), seconds_left, terminal_ ? "  " : "\n");
    std::fflush(stdout);
  }

  void line(const std::string& text, const nlohmann::json& row) {
    if (!enabled_) return;
    write(row);
    std::printf("%s%s\n", std::exchange(line_open_, false) ? "\n" : "", text.c_str());
    std::fflush(stdout);
  }

 private:
  void write(const nlohmann::json& row) {
    if (log_.is_open()) log_ << row.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) << std::endl;
  }

  bool enabled_;
  bool terminal_;
  bool line_open_ = false;  // the last progress line can still be overwritten
  std::ofstream log_;
  std::chrono::steady_clock::time_point shown_{};
};

/// Linear warm-up by steps, times a cosine from 1 to 0.05 by progress, as the number of steps is not known where --minutes decides.
double lr_factor(const Options& options, std::int64_t step, double progress) {
  const double warmup = std::min(1.0, static_cast<double>(step + 1) / static_cast<double>(std::max<std::int64_t>(options.warmup, 1)));
  return warmup * (0.05 + 0.95 * 0.5 * (1 + std::cos(std::numbers::pi * progress)));
}

/// What a run starts with, for the terminal.
std::string describe(const Options& options, std::int64_t parameters, const Corpus& corpus, const fsdp::DeviceMesh& mesh) {
  char text[160];
  std::snprintf(text, sizeof(text), "%.2f M parameters (%s) over %d rank%s; %.2f MB of text for training, %.2f MB for validation, from ",
                static_cast<double>(parameters) / 1e6, options.strategy.c_str(), static_cast<int>(mesh.size()), mesh.size() == 1 ? "" : "s",
                static_cast<double>(corpus.train().size()) / 1e6, static_cast<double>(corpus.validation().size()) / 1e6);
  return text + options.data;
}

at::ScalarType dtype_of(const std::string& name) { return name == "bf16" ? at::kBFloat16 : at::kFloat; }

bool is_hidden_matrix(const std::string& name) { return name.starts_with("blocks.") && name.find("norm") == std::string::npos; }

fsdp::FullyShardOptions sharding_of(const Options& options, const fsdp::DeviceMesh& mesh) {
  fsdp::FullyShardOptions sharding{.mesh = mesh,
                                   .units = fsdp::each<GPTBlockImpl>(),
                                   .placements = fsdp::Placements::from_name(options.strategy),
                                   .outer_placements = fsdp::Placements::from_name(options.outer_strategy),
                                   .reshard_after_forward = !options.no_reshard_after_forward,
                                   .keep_gathered_bytes = options.keep_gathered_mib << 20,
                                   .prefetch_depth = options.prefetch,
                                   .offload = options.offload == "all"         ? fsdp::Offload::kAll
                                              : options.offload == "optimizer" ? fsdp::Offload::kOptimizerState
                                                                               : fsdp::Offload::kNone};
  sharding.mixed_precision =
      fsdp::MixedPrecisionPolicy{.param_dtype = dtype_of(options.param_dtype), .grad_comm_dtype = dtype_of(options.wire_dtype)};
  if (options.float8_gather) {
    const auto float8 = std::make_shared<const fsdp::GatherFormat>(fsdp::float8_blocks());
    sharding.gather_format = [float8](const std::string& name, const at::Tensor&) { return is_hidden_matrix(name) ? float8 : nullptr; };
  }
  if (options.optimizer == "muon") sharding.granularity = fsdp::whole_matrices(is_hidden_matrix);
  if (options.optimizer == "adamw8bit") {
    sharding.granularity = [](const std::string&, const at::Tensor&) { return fsdp::Granularity::blocks(256); };
  }
  return sharding;
}

fsdp::Optimizer optimizer_of(const Options& options, GPT& model) {
  const auto no_decay = [](const std::string& name) {
    return name.find("norm") != std::string::npos || name.find("embedding") != std::string::npos;
  };
  const std::vector<fsdp::ParamGroup> groups{{.matches = no_decay, .weight_decay = 0.0}};
  const fsdp::AdamWOptions adamw{.lr = options.lr, .betas = {0.9, 0.95}, .weight_decay = options.weight_decay};
  if (options.optimizer == "muon") {
    // At AdamW's learning rate and weight decay: the size of updates is matched.
    return fsdp::Muon(*model,
                      {.lr = options.lr,
                       .weight_decay = options.weight_decay,
                       .adjust_lr = fsdp::AdjustLR::kMatchRMSAdamW,
                       .matrices = is_hidden_matrix,
                       .adamw = adamw},
                      groups);
  }
  if (options.optimizer == "adamw8bit") {
    return fsdp::AdamW8bit(*model, {.lr = options.lr, .betas = {0.9, 0.95}, .weight_decay = options.weight_decay}, groups);
  }
  return fsdp::AdamW(*model, adamw, groups);
}

/// Set by SIGTERM, which Slurm and torchrun send some time before they kill.
volatile std::sig_atomic_t asked_to_end = 0;

std::string checkpoint_of(const Options& options, std::int64_t step) {
  return options.save + "/" + options.save_name + "-" + std::to_string(step);
}

/// Goes on from a checkpoint, if the options say so and there is one.
std::optional<fsdp::Loaded> resume(const Options& options, GPT& model, fsdp::Optimizer& optimizer) {
  if (options.resume == "no") return std::nullopt;
  if (options.resume == "auto") return fsdp::load_latest(options.save, *model, optimizer);
  return fsdp::load(options.resume, *model, optimizer);
}

int train(const Options& options, const Corpus& corpus) {
  at::set_num_threads(options.threads);
  std::signal(SIGTERM, [](int) { asked_to_end = 1; });
  const auto line = fsdp::init_device_mesh(options.device, {{"dp_shard", -1}});
  try {
    validate_ranks(options, line.size());
  } catch (const UsageError& error) {
    if (line.rank() == 0) std::cerr << "train_gpt: " << error.what() << std::endl;
    line.barrier();  // A launcher that sees a rank end may stop the others before rank 0 has spoken.
    return kUsageExitCode;
  }
  const auto mesh = options.outer == 1 ? line : fsdp::init_device_mesh(options.device, {{"dp_outer", options.outer}, {"dp_shard", -1}});
  torch::manual_seed(options.seed);
  GPT model(options.model);
  model->to(mesh.device());
  std::int64_t parameters = 0;
  for (const auto& parameter : model->parameters()) parameters += parameter.numel();
  auto sharded = fsdp::fully_shard(*model, sharding_of(options, mesh));
  auto optimizer = optimizer_of(options, model);

  Reporter report(options, mesh.rank() == 0);
  report.line(describe(options, parameters, corpus, mesh), {{"ranks", mesh.size()},
                                                            {"parameters", parameters},
                                                            {"strategy", options.strategy},
                                                            {"train_bytes", corpus.train().size()},
                                                            {"validation_bytes", corpus.validation().size()}});
  const std::int64_t share = options.batch / mesh.size();
  const std::int64_t at_once = share / options.accumulate;
  std::int64_t step = 0;
  double seconds_before = 0;  // of the runs that this one continues
  if (const auto loaded = resume(options, model, optimizer)) {
    step = std::get<std::int64_t>(loaded->extra.at("step"));
    seconds_before = std::get<double>(loaded->extra.at("seconds"));
    report.line("resumed from " + loaded->path, {{"resumed", step}});
  }
  const auto begin = std::chrono::steady_clock::now();
  const auto seconds_so_far = [&] { return seconds_before + seconds_since(begin); };
  std::optional<fsdp::AsyncSaver> saver;
  if (options.save_async) saver.emplace(*model, &optimizer);
  const auto save = [&] {
    const fsdp::ExtraState extra = {{"step", step}, {"seconds", seconds_so_far()}};
    const fsdp::SaveOptions how{.keep_last = options.keep_last};
    if (saver) {
      saver->save(checkpoint_of(options, step), extra, how);
    } else {
      fsdp::save(checkpoint_of(options, step), *model, optimizer, extra, how);
    }
  };
  // Progress in [0, 1]: by steps, or by rank 0's clock, which every rank must agree on.
  const auto done = [&] {
    if (options.steps > 0) return static_cast<double>(step) / static_cast<double>(options.steps);
    return std::min(1.0, mesh.sum(mesh.rank() == 0 ? seconds_so_far() / (60 * options.minutes) : 0.0));
  };
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
    fsdp::clip_grad_norm(*model, options.clip);
    optimizer.step();
    optimizer.zero_grad();

    ++step;
    const double global_loss = mesh.sum(loss) / static_cast<double>(mesh.size());
    if (!std::isfinite(global_loss)) throw std::runtime_error("the loss of step " + std::to_string(step) + " is not finite; lower --lr");
    const double seconds = seconds_since(step_begin);
    progress = done();
    report.step({{"step", step},
                 {"loss", global_loss},
                 {"lr", optimizer.lr()},
                 {"tokens_per_second", static_cast<double>(options.batch * options.model.context) / seconds},
                 {"peak_mib", static_cast<double>(sharded.memory_stats().total.peak) / (1 << 20)}},
                seconds_so_far() / progress * (1 - progress));
    const bool ends = mesh.sum(asked_to_end) > 0;  // One rank may have heard of it before the others.
    if (!options.save.empty() && (ends || progress >= 1 || step % options.save_every == 0)) save();
    if (ends) {
      if (saver) saver->wait();
      report.line("ended by SIGTERM after step " + std::to_string(step) +
                      (options.save.empty() ? ", nothing saved: no --save" : ", saved to " + checkpoint_of(options, step)),
                  {{"step", step}, {"ended", "SIGTERM"}});
      mesh.barrier();
      return 0;
    }
    if (progress < 1 && step % options.eval_every == 0) {
      const double bits = evaluate(model, corpus, options, mesh);
      char text[80];
      std::snprintf(text, sizeof(text), "step %5d  validation %.3f bits per byte", static_cast<int>(step), bits);
      report.line(text, {{"step", step}, {"validation_bits_per_byte", bits}});
    }
  }
  if (saver) saver->wait();
  const double seconds = seconds_so_far();
  const double bits = evaluate(model, corpus, options, mesh);
  const auto text = sample(model, options, mesh);
  char summary[200];
  std::snprintf(summary, sizeof(summary), "done: %d steps in %.0f s, validation %.3f bits per byte, peak engine memory %.1f MiB per rank",
                static_cast<int>(step), seconds, bits, static_cast<double>(sharded.memory_stats().total.peak) / (1 << 20));
  report.line("--- sample ---\n" + printable(text) + "\n--------------\n" + summary,
              {{"step", step}, {"seconds", seconds}, {"validation_bits_per_byte", bits}, {"sample", text}});
  mesh.barrier();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("Trains a byte-level GPT on text, sharded over processes, and lets it write a sample.", "train_gpt");
  add_options(app, options);
  std::optional<Corpus> corpus;
  try {
    app.parse(argc, argv);
    validate(options);
    // Another launcher's number of ranks is known once they have met.
    if (!fsdp::is_launched()) validate_ranks(options, options.nproc);
    if (!options.prompt && app.count("--data") == 0) options.prompt = "#include <";
    corpus.emplace(options.data);
    validate_data(options, *corpus);
    const std::ofstream log(options.log, std::ios::app);
    require(options.log.empty() || log.good(), "cannot write --log " + options.log);
  } catch (const CLI::Success& help) {
    return app.exit(help);
  } catch (const std::exception& error) {
    std::cerr << "train_gpt: " << error.what() << "\n";
    return kUsageExitCode;
  }
  return fsdp::launch_local(options.nproc, [&] { return train(options, *corpus); });
}
