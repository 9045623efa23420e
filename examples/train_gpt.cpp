// Trains a GPT on text, sharded over processes: the project's main program.

#include <fsdp/fsdp.h>    // sharding, optimizer, ranks on this machine
#include <torch/torch.h>  // the model
#include <unistd.h>       // isatty

#include <CLI/CLI.hpp>  // options
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>  // the log
#include <optional>
#include <string>

#include "corpus.h"  // text as bytes, deterministic batches
#include "gpt.h"     // the model, plain LibTorch

namespace {

struct Options {
  std::string data = TRAIN_GPT_DEFAULT_DATA;
  int nproc = 2;
  GPTConfig model{.vocab = 256, .dim = 256, .layers = 6, .heads = 4, .context = 256};
  std::int64_t batch = 8;
  std::int64_t steps = 0;
  double minutes = 5;
  double lr = 2e-3;
  std::int64_t warmup = 30;
  double weight_decay = 0.1;
  double clip = 1.0;
  std::string strategy = "optim_grads_params";
  bool no_reshard_after_forward = false;
  int prefetch = 1;
  std::uint64_t seed = 1;
  std::int64_t eval_every = 200;
  std::int64_t eval_sequences = 64;
  std::string log;
  std::int64_t sample_tokens = 400;
  double temperature = 0.8;
  std::string prompt = "#include <";
  int threads = 1;
  std::string device = "cpu";
};

/// A wrong option: one line, exit code 2.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

void require(bool holds, const std::string& what) {
  if (!holds) throw UsageError(what);
}

void validate(const Options& options, int ranks) {
  const auto& model = options.model;
  require(ranks >= 1, "--nproc must be at least 1");
  require(model.dim > 0 && model.layers > 0 && model.heads > 0 && model.context > 1,
          "--dim, --layers, --heads must be positive, --context > 1");
  require(model.dim % model.heads == 0 && model.dim / model.heads % 2 == 0,
          "--dim " + std::to_string(model.dim) + " does not divide into --heads " + std::to_string(model.heads) + " of even width");
  require(ranks <= options.batch,
          "more ranks (" + std::to_string(ranks) + ") than sequences per step (--batch " + std::to_string(options.batch) + ")");
  require(options.batch % ranks == 0,
          "--batch " + std::to_string(options.batch) + " does not divide over " + std::to_string(ranks) + " ranks");
  require(options.steps >= 0 && options.minutes > 0, "--steps must be at least 0 (0: by --minutes) and --minutes positive");
  require(options.lr > 0 && options.clip > 0 && options.temperature > 0, "--lr, --clip and --temperature must be positive");
  require(options.warmup >= 0 && options.prefetch >= 0 && options.weight_decay >= 0,
          "--warmup, --prefetch and --weight-decay must be at least 0");
  require(options.eval_every > 0 && options.eval_sequences > 0 && options.threads > 0,
          "--eval-every, --eval-sequences and --threads must be positive");
}

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

/// What the model writes after the prompt. Collective: every rank computes the same, as the parameters are sharded.
std::string sample(GPT& model, const Options& options, const fsdp::DeviceMesh& mesh) {
  const torch::NoGradGuard no_grad;
  auto generator = at::detail::createCPUGenerator(options.seed);
  std::vector<std::int64_t> tokens{Corpus::kStart};
  for (const char c : options.prompt) tokens.push_back(static_cast<std::uint8_t>(c));
  std::string text = options.prompt;
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
    std::printf("%sstep %5d  loss %.4f  %7.0f tokens/s  lr %.2e  peak %6.1f MiB  %3.0f s left%s", terminal_ ? "\r" : "",
                row["step"].get<int>(), row["loss"].get<double>(), row["tokens_per_second"].get<double>(), row["lr"].get<double>(),
                row["peak_mib"].get<double>(), seconds_left, terminal_ ? "  " : "\n");
    std::fflush(stdout);
  }

  void line(const std::string& text, const nlohmann::json& row) {
    if (!enabled_) return;
    write(row);
    std::printf("%s%s\n", terminal_ ? "\n" : "", text.c_str());
    std::fflush(stdout);
  }

 private:
  void write(const nlohmann::json& row) {
    if (log_.is_open()) log_ << row.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) << std::endl;
  }

  bool enabled_;
  bool terminal_;
  std::ofstream log_;
  std::chrono::steady_clock::time_point shown_{};
};

int train(const Options& options, const Corpus& corpus) {
  at::set_num_threads(options.threads);
  const auto mesh = fsdp::init_device_mesh(options.device, {{"dp_shard", -1}});
  torch::manual_seed(options.seed);
  GPT model(options.model);
  model->to(mesh.device());
  auto sharded = fsdp::fully_shard(*model, {.mesh = mesh,
                                            .units = fsdp::each<GPTBlockImpl>(),
                                            .placements = fsdp::Placements::from_name(options.strategy),
                                            .reshard_after_forward = !options.no_reshard_after_forward,
                                            .prefetch_depth = options.prefetch});
  const auto no_decay = [](const std::string& name) {
    return name.find("norm") != std::string::npos || name.find("embedding") != std::string::npos;
  };
  fsdp::AdamW optimizer(*model, {.lr = options.lr, .betas = {0.9, 0.95}, .weight_decay = options.weight_decay},
                        {{.matches = no_decay, .weight_decay = 0.0}});

  Reporter report(options, mesh.rank() == 0);
  const std::int64_t share = options.batch / mesh.size();
  const auto begin = std::chrono::steady_clock::now();
  double bits = 0;
  std::int64_t step = 0;
  // Progress in [0, 1]: by steps, or by rank 0's clock, which every rank must agree on.
  const auto done = [&] {
    if (options.steps > 0) return static_cast<double>(step) / static_cast<double>(options.steps);
    return std::min(1.0, mesh.sum(mesh.rank() == 0 ? seconds_since(begin) / (60 * options.minutes) : 0.0));
  };
  for (double progress = 0; progress < 1; progress = done()) {
    const auto step_begin = std::chrono::steady_clock::now();
    const double warmup = std::min(1.0, static_cast<double>(step + 1) / static_cast<double>(std::max<std::int64_t>(options.warmup, 1)));
    optimizer.set_lr_factor(warmup * (0.05 + 0.95 * 0.5 * (1 + std::cos(M_PI * progress))));

    const auto batch =
        corpus.sample({.seed = options.seed, .step = step, .first = mesh.rank() * share, .count = share}, options.model.context);
    const auto loss = model->loss(batch.tokens.to(mesh.device()), batch.targets.to(mesh.device()));
    loss.backward();
    fsdp::clip_grad_norm(*model, options.clip);
    optimizer.step();
    optimizer.zero_grad();

    ++step;
    const double global_loss = mesh.sum(loss.item<double>()) / static_cast<double>(mesh.size());
    const double seconds = seconds_since(step_begin);
    const double left = progress > 0 ? seconds_since(begin) / progress * (1 - progress) : 60 * options.minutes;
    report.step({{"step", step},
                 {"loss", global_loss},
                 {"lr", optimizer.lr()},
                 {"tokens_per_second", static_cast<double>(options.batch * options.model.context) / seconds},
                 {"peak_mib", static_cast<double>(sharded.memory_stats().total.peak) / (1 << 20)}},
                left);
    if (step % options.eval_every == 0) {
      bits = evaluate(model, corpus, options, mesh);
      char text[80];
      std::snprintf(text, sizeof(text), "step %5d  validation %.3f bits per byte", static_cast<int>(step), bits);
      report.line(text, {{"step", step}, {"validation_bits_per_byte", bits}});
    }
  }
  const double seconds = seconds_since(begin);
  bits = evaluate(model, corpus, options, mesh);
  const auto text = sample(model, options, mesh);
  char summary[200];
  std::snprintf(summary, sizeof(summary), "done: %d steps in %.0f s, validation %.3f bits per byte, peak engine memory %.1f MiB per rank",
                static_cast<int>(step), seconds, bits, static_cast<double>(sharded.memory_stats().total.peak) / (1 << 20));
  report.line("--- sample ---\n" + text + "\n--------------\n" + summary,
              {{"step", step}, {"seconds", seconds}, {"validation_bits_per_byte", bits}, {"sample", text}});
  mesh.barrier();
  return 0;
}

void add_options(CLI::App& app, Options& options) {
  app.add_option("--data", options.data, "A text file, or a folder of them; by default LibTorch's own headers");
  app.add_option("--nproc", options.nproc, "Ranks to start here (ignored under torchrun, mpirun, srun)")->capture_default_str();
  app.add_option("--dim", options.model.dim, "Width")->capture_default_str();
  app.add_option("--layers", options.model.layers, "Blocks")->capture_default_str();
  app.add_option("--heads", options.model.heads, "Attention heads")->capture_default_str();
  app.add_option("--context", options.model.context, "Bytes per sequence")->capture_default_str();
  app.add_flag("--tied", options.model.tied, "The output layer is the embedding");
  app.add_option("--batch", options.batch, "Sequences per step, over all ranks")->capture_default_str();
  app.add_option("--steps", options.steps, "Steps to train; 0 trains for --minutes")->capture_default_str();
  app.add_option("--minutes", options.minutes, "Minutes to train")->capture_default_str();
  app.add_option("--lr", options.lr, "Peak learning rate")->capture_default_str();
  app.add_option("--warmup", options.warmup, "Warm-up steps")->capture_default_str();
  app.add_option("--weight-decay", options.weight_decay, "Of all but norms and embeddings")->capture_default_str();
  app.add_option("--clip", options.clip, "Largest gradient norm")->capture_default_str();
  app.add_option("--strategy", options.strategy, "What is sharded")
      ->check(CLI::IsMember({"no_shard", "optim", "optim_grads", "optim_grads_params"}))
      ->capture_default_str();
  app.add_flag("--no-reshard-after-forward", options.no_reshard_after_forward, "Keep parameters between forward and backward");
  app.add_option("--prefetch", options.prefetch, "Units to read ahead")->capture_default_str();
  app.add_option("--seed", options.seed, "Of model, batches and sample")->capture_default_str();
  app.add_option("--eval-every", options.eval_every, "Steps between validations")->capture_default_str();
  app.add_option("--eval-sequences", options.eval_sequences, "Sequences per validation")->capture_default_str();
  app.add_option("--log", options.log, "JSON-lines file");
  app.add_option("--sample-tokens", options.sample_tokens, "Bytes to write at the end")->capture_default_str();
  app.add_option("--temperature", options.temperature, "Of the sample")->capture_default_str();
  app.add_option("--prompt", options.prompt, "What the sample continues")->capture_default_str();
  app.add_option("--threads", options.threads, "Per rank")->capture_default_str();
  app.add_option("--device", options.device, "cpu or cuda")->check(CLI::IsMember({"cpu", "cuda"}))->capture_default_str();
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("Trains a GPT on text, sharded over processes.");
  add_options(app, options);
  std::optional<Corpus> corpus;
  try {
    app.parse(argc, argv);
    if (!fsdp::is_launched()) validate(options, options.nproc);
    corpus.emplace(options.data);
    std::ofstream log(options.log, std::ios::app);
    require(options.log.empty() || log.good(), "can't write --log " + options.log);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help
    std::cerr << "train_gpt: " << error.what() << "\n";
    return 2;
  } catch (const std::exception& error) {
    std::cerr << "train_gpt: " << error.what() << "\n";
    return 2;
  }
  return fsdp::launch_local(options.nproc, [&] { return train(options, *corpus); });
}
