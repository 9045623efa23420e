#include "train_gpt/options.h"

#include <fsdp/error.h>
#include <fsdp/launch.h>
#include <fsdp/size.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <utility>
#include <vector>

#include "train_gpt/config.h"
#include "train_gpt/resume.h"
#include "train_gpt/run_folder.h"

void require(bool holds, const std::string& what) {
  if (!holds) throw UsageError(what);
}

void validate_ranks(const Options& options, std::int64_t ranks) {
  const std::string batch = "--batch " + std::to_string(options.batch);
  require(ranks <= options.batch, "more ranks (" + std::to_string(ranks) + ") than sequences per step (" + batch + ")");
  require(options.batch % ranks == 0, batch + " does not divide over " + std::to_string(ranks) + " ranks");
  require(options.batch / ranks % options.accumulate == 0, "each rank's " + std::to_string(options.batch / ranks) + " sequences of " +
                                                               batch + " do not divide into --accumulate " +
                                                               std::to_string(options.accumulate));
  require(ranks % options.outer == 0, "--outer " + std::to_string(options.outer) + " does not divide " + std::to_string(ranks) + " ranks");
}

namespace {

void validate(const Options& options) {
  const auto& model = options.model;
  require(options.nproc >= 1, "--nproc must be at least 1");
  require(model.dim > 0 && model.layers > 0 && model.heads > 0 && model.context > 1,
          "--dim, --layers, --heads must be positive, --context > 1");
  require(model.dim % model.heads == 0 && model.dim / model.heads % 2 == 0,
          "--dim " + std::to_string(model.dim) + " does not divide into --heads " + std::to_string(model.heads) + " of even width");
  require(options.batch > 0, "--batch must be positive");
  require(options.steps >= 0 && options.minutes >= 0 && (options.steps > 0 || options.minutes > 0),
          "--steps and --minutes must be at least 0, and one of them positive");
  require(options.lr > 0 && options.clip > 0, "--lr and --clip must be positive");
  require(options.warmup >= 0 && options.prefetch >= 0 && options.weight_decay >= 0,
          "--warmup, --prefetch and --weight-decay must be at least 0");
  require(options.eval_every > 0 && options.eval_sequences > 0 && options.threads > 0,
          "--eval-every, --eval-sequences and --threads must be positive");
  require(options.sample_every >= 0 && options.sample_tokens >= 0 && options.temperature >= 0,
          "--sample-every, --sample-tokens and --temperature must be at least 0");
  require(options.save_every > 0 && options.memory_every > 0 && options.keep_last >= 0,
          "--save-every and --memory-every must be positive and --keep-last at least 0");
  require(options.resume != "auto" || !options.save.empty() || !options.run.empty(),
          "--resume auto looks for the newest checkpoint of --run, or in --save: give one of them, too");
  require(options.resume == "auto" || options.run.empty() || !has_config(options.run),
          "--run " + options.run + " holds a run: go on with --resume " + options.run + ", or choose another folder");
  require(options.accumulate > 0 && options.outer > 0, "--accumulate and --outer must be positive");
  require(options.outer_strategy == "no_shard" || (options.outer > 1 && options.strategy == "optim_grads_params"),
          "--outer-strategy optim needs --outer of at least 2 and --strategy optim_grads_params");
  require(options.keep_gathered_bytes == 0 || (options.strategy == "optim_grads_params" && !options.no_reshard_after_forward),
          "--keep-gathered needs --strategy optim_grads_params without --no-reshard-after-forward: otherwise all parameters stay gathered");
  require(!options.no_reshard_after_forward || options.strategy == "optim_grads_params",
          "--no-reshard-after-forward needs --strategy optim_grads_params: with " + options.strategy + ", parameters stay whole anyway");
}

void validate_data(const Options& options, const Corpus& corpus) {
  const auto check = [&](const std::vector<std::uint8_t>& text, const std::string& part) {
    require(static_cast<std::int64_t>(text.size()) > options.model.context, options.data + " is too small: its " + part + " part has " +
                                                                                std::to_string(text.size()) + " bytes, and --context " +
                                                                                std::to_string(options.model.context) + " needs more");
  };
  check(corpus.train(), "training");
  check(corpus.validation(), "validation");
}

void add_options(CLI::App& app, Options& options) {
  const auto option = [&app](const char* name, auto& value, const char* help) {
    return app.add_option(name, value, help)->capture_default_str();
  };
  app.get_formatter()->column_width(34);
  app.option_defaults()->take_last();  // so that a script can append what differs

  app.add_option("--data", options.data, "A text file, or a folder of them (default: LibTorch's own headers)")->group("Data");
  option("--seed", options.seed, "Of the model, the batches and the sample")->group("Data");

  option("--dim", options.model.dim, "Width of the model; --heads must divide it")->group("Model");
  option("--layers", options.model.layers, "Transformer blocks; each is a unit of sharding")->group("Model");
  option("--heads", options.model.heads, "Attention heads")->group("Model");
  option("--context", options.model.context, "Bytes per sequence")->group("Model");
  app.add_flag("--tied", options.model.tied, "Use the embedding as the output layer")->group("Model");

  option("--batch", options.batch, "Sequences per step over all ranks, whose number must divide it")->group("Training");
  option("--steps", options.steps, "How many to train for; alone, however long they take")->group("Training");
  option("--minutes", options.minutes, "Train for no longer than this; alone, for so long, however many steps fit in")->group("Training");
  option("--lr", options.lr, "Peak learning rate")->group("Training");
  option("--warmup", options.warmup, "Steps until the learning rate peaks")->group("Training");
  option("--weight-decay", options.weight_decay, "Of all parameters but norms and embeddings")->group("Training");
  option("--clip", options.clip, "Largest norm of the gradients")->group("Training");
  option("--accumulate", options.accumulate, "Backwards per step, each over its part of the batch; reduced once")->group("Training");
  option("--optimizer", options.optimizer, "muon: on the blocks' matrices, AdamW for the rest")
      ->check(CLI::IsMember({"adamw", "adamw8bit", "muon"}))
      ->group("Training");
  app.add_flag("--checkpoint", options.model.checkpoint, "Compute blocks twice instead of keeping their activations")->group("Training");

  option("--nproc", options.nproc, "Ranks to start on this machine; ignored under another launcher")->group("Sharding");
  option("--strategy", options.strategy, "What is sharded: ZeRO-0, 1, 2, 3")
      ->check(CLI::IsMember({"no_shard", "optim", "optim_grads", "optim_grads_params"}))
      ->group("Sharding");
  option("--outer", options.outer, "Rows of ranks: sharded within a row, replicated over rows")->group("Sharding");
  option("--outer-strategy", options.outer_strategy, "optim: over rows, the optimizer is sharded as well")
      ->check(CLI::IsMember({"no_shard", "optim"}))
      ->group("Sharding");
  option("--param-dtype", options.param_dtype, "In which the model computes; the optimizer's parameters stay fp32")
      ->check(CLI::IsMember({"fp32", "bf16"}))
      ->group("Sharding");
  option("--wire-dtype", options.wire_dtype, "In which gradients travel; sums are fp32")
      ->check(CLI::IsMember({"fp32", "bf16"}))
      ->group("Sharding");
  app.add_flag("--float8-gather", options.float8_gather, "The blocks' matrices travel in 8 bits")->group("Sharding");
  option("--offload", options.offload, "To host memory: the optimizer's state, or all that lasts; then the CPU updates")
      ->check(CLI::IsMember({"none", "optimizer", "all"}))
      ->group("Sharding");
  app.add_option_function<std::string>(
         "--keep-gathered", [&options](const std::string& size) { options.keep_gathered_bytes = fsdp::parse_size(size); },
         "So much of gathered parameters stays between forward and backward, as in 500MB (default: 0B)")
      ->group("Sharding");
  app.add_flag("--no-reshard-after-forward", options.no_reshard_after_forward, "Keep gathered parameters between forward and backward")
      ->group("Sharding");
  option("--prefetch", options.prefetch, "Units whose parameters are gathered ahead")->group("Sharding");
  option("--threads", options.threads, "Per rank")->group("Sharding");
  option("--device", options.device, "Where to train")->check(CLI::IsMember({"cpu", "cuda"}))->group("Sharding");

  app.add_option("--run", options.run, "A folder for configuration, log, checkpoints and plot (default: a new one below runs/)")
      ->group("Run");
  option("--resume", options.resume,
         "A run's folder: go on with it, with its configuration but for what is given here; auto: the newest in --run or --save, if there "
         "is one; or begin a new run from a checkpoint's path")
      ->group("Run");
  app.add_option("--save", options.save, "A folder for checkpoints, each a folder (default: checkpoints in --run)")->group("Checkpoints");
  option("--save-name", options.save_name, "Checkpoints are called NAME-N: jobs that share a folder need different ones")
      ->group("Checkpoints");
  app.add_flag("--save-async", options.save_async, "Write checkpoints beside training")->group("Checkpoints");
  app.add_option("--memory", options.memory,
                 "A folder in tmpfs, such as /dev/shm/RUN, for checkpoints in memory, too: a run that is restarted goes on from them")
      ->group("Checkpoints");
  option("--memory-every", options.memory_every, "Steps between checkpoints in memory")->group("Checkpoints");
  app.add_flag("--memory-wait", options.memory_wait, "Wait for each of them: a restart repeats at most as many steps")
      ->group("Checkpoints");
  option("--save-every", options.save_every, "Steps between checkpoints; the last step is saved, too, and each that is validated")
      ->group("Checkpoints");
  option("--keep-last", options.keep_last, "How many of the newest are kept, beside the best by validation; 0: all")->group("Checkpoints");

  app.add_option("--log", options.log, "A JSON-lines file, one object per step and validation (default: log.jsonl in --run)")
      ->group("Output");
  app.add_flag("--timeline", options.timeline, "At the end, draw what the ranks did in the last steps: timeline.html in --run")
      ->group("Output");
  option("--eval-every", options.eval_every, "Steps between validations")->group("Output");
  option("--eval-sequences", options.eval_sequences, "Sequences per validation, rounded up to a multiple of the ranks")->group("Output");
  app.add_option("--prompt", options.prompt, "What the sample continues (default: \"#include <\", or nothing with --data)")
      ->group("Output");
  auto* generate =
      app.add_option(
             "--generate", options.generate,
             "Do not train: write text from the checkpoint of this run's folder that is best by validation; the newest, if none was "
             "validated")
          ->excludes("--resume")
          ->excludes("--run")
          ->group("Output");
  app.add_flag("--newest", options.newest, "With --generate: from the newest checkpoint in any case")->needs(generate)->group("Output");
  option("--sample-every", options.sample_every,
         "Steps between samples, which rank 0 writes beside training by a copy of the model; 0: one in the end")
      ->group("Output");
  option("--sample-tokens", options.sample_tokens, "Bytes of a sample at most")->group("Output");
  option("--temperature", options.temperature, "Of the sample: lower is more repetitive, higher is wilder; 0: always the likeliest byte")
      ->group("Output");

  app.footer(
      "Ranks are started here, or by torchrun --no-python, mpirun or srun: then leave out --nproc.\n"
      "Ctrl-C and SIGTERM save a checkpoint and end the run; --resume goes on with it.\n"
      "Exit codes: 0 trained, or ended by these signals and saved; 2 wrong option or data; others a failure in training.");
}

// The folder whose configuration holds where the command line says nothing.
std::string folder_with_config(const Options& options) {
  if (!options.generate.empty()) return options.generate;
  if (has_config(options.resume)) return options.resume;
  return options.resume == "auto" && has_config(options.run) ? options.run : "";
}

// The program may go on from another working directory.
void make_absolute(std::string& path) {
  if (!path.empty()) path = std::filesystem::absolute(path).lexically_normal();
}

bool can_write(const std::filesystem::path& file) {
  return !std::filesystem::is_directory(file) && access(file.parent_path().c_str(), W_OK) == 0;
}

}  // namespace

std::optional<Options> parse(int argc, char** argv) {
  Options options;
  CLI::App app("Trains a byte-level GPT on text, sharded over processes, and lets it write a sample.", "train_gpt");
  add_options(app, options);
  try {
    app.parse(argc, argv);
    check_places(options);
    if (const auto folder = folder_with_config(options); !folder.empty()) {
      const auto saved = options = read_config(folder);
      app.parse(argc, argv);  // What is given here overrides what is written there.
      check_same(options, saved, folder);
    } else if (app.count("--prompt") == 0 && app.count("--data") == 0) {
      options.prompt = "#include <";
    }
    if (app.count("--minutes") > 0 && app.count("--steps") == 0) options.steps = 0;
    if (app.count("--steps") > 0 && app.count("--minutes") == 0) options.minutes = 0;
    if (has_config(options.resume)) options.run = std::exchange(options.resume, "auto");
    for (auto* path : {&options.data, &options.log, &options.save, &options.memory}) make_absolute(*path);
    validate(options);
    check_checkpoint(options);
    if (options.generate.empty()) {
      check_folder(options);
      // Another launcher's number of ranks is known once they have met.
      if (!fsdp::is_launched()) validate_ranks(options, options.nproc);
    }
    require(options.log.empty() || can_write(options.log), "cannot write --log " + options.log);
  } catch (const CLI::Success& help) {
    app.exit(help);
    return std::nullopt;
  } catch (const CLI::Error& error) {
    throw UsageError(error.what());
  } catch (const fsdp::Error& error) {  // The only option that the library reads.
    throw UsageError(std::string("--keep-gathered: ") + error.what());
  }
  return options;
}

Corpus read_corpus(const Options& options) {
  Corpus corpus(options.data);
  validate_data(options, corpus);
  return corpus;
}
