#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

#include "corpus.h"
#include "gpt.h"

// The options of train_gpt: names and help on the command line, and which are refused.

struct Options {
  std::string data = TRAIN_GPT_DEFAULT_DATA;
  int nproc = 2;
  GPTConfig model{.vocab = 256, .dim = 256, .layers = 6, .heads = 4, .context = 256};
  std::int64_t batch = 4;
  std::int64_t steps = 800;  ///< 0: until `minutes` are over.
  double minutes = 12;       ///< 0: however long it takes.
  double lr = 2e-3;
  std::int64_t warmup = 30;
  double weight_decay = 0.1;
  double clip = 1.0;
  std::int64_t accumulate = 1;
  std::string optimizer = "adamw";
  std::string strategy = "optim_grads_params";
  std::int64_t outer = 1;
  std::string outer_strategy = "no_shard";
  std::string param_dtype = "fp32";
  std::string wire_dtype = "fp32";
  bool float8_gather = false;
  std::string offload = "none";
  std::int64_t keep_gathered_bytes = 0;
  bool no_reshard_after_forward = false;
  int prefetch = 1;
  std::uint64_t seed = 1;
  std::int64_t eval_every = 200;
  std::int64_t eval_sequences = 64;
  std::string run = {};   ///< The folder of this run. Empty: a new one below runs/.
  std::string log = {};   ///< Empty: in the folder of the run, as is `save`.
  bool timeline = false;  ///< The run gets a page of what its ranks did last.
  std::string save = {};
  std::string save_name = "step";
  bool save_async = false;
  std::string memory = {};  ///< A folder in tmpfs for checkpoints in memory. Empty: none.
  std::int64_t memory_every = 10;
  bool memory_wait = false;  ///< Training waits for each of them, so that a restart repeats at most `memory_every` steps.
  std::int64_t save_every = 100;
  int keep_last = 2;
  std::string resume = "no";
  std::int64_t sample_every = 0;  ///< 0: in the end only.
  std::int64_t sample_tokens = 400;
  double temperature = 0.8;
  std::string prompt;         ///< By default one that suits the default data.
  std::string generate = {};  ///< The folder of the run that writes text. Empty: train.
  bool newest = false;        ///< Text from the newest checkpoint, not from the best.
  int threads = 1;
  std::string device = "cpu";
};

constexpr int kUsageExitCode = 2;

/// A wrong option, or data that does not fit: one line, kUsageExitCode.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Throws UsageError unless it holds.
void require(bool holds, const std::string& what);
/// Throws UsageError where options contradict the number of ranks.
void validate_ranks(const Options& options, std::int64_t ranks);
/// The text to train on. Throws std::runtime_error if it cannot be read, and UsageError if it is too small.
Corpus read_corpus(const Options& options);

/// Reads the command line; where it names the folder of a run to go on with or to generate from, that run's configuration holds for what
/// the command line leaves out. Nothing, if it asked for help, which is printed. Throws UsageError.
std::optional<Options> parse(int argc, char** argv);
