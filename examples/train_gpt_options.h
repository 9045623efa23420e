#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

#include "corpus.h"
#include "gpt.h"

// The options of train_gpt.

struct Options {
  std::string data = TRAIN_GPT_DEFAULT_DATA;
  int nproc = 2;
  GPTConfig model{.vocab = 256, .dim = 256, .layers = 6, .heads = 4, .context = 256};
  std::int64_t batch = 4;
  std::int64_t steps = 0;
  double minutes = 5.75;
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
  std::int64_t keep_gathered_mib = 0;
  bool no_reshard_after_forward = false;
  int prefetch = 1;
  std::uint64_t seed = 1;
  std::int64_t eval_every = 200;
  std::int64_t eval_sequences = 64;
  std::string log;
  std::string save;
  std::string save_name = "step";
  bool save_async = false;
  std::int64_t save_every = 100;
  int keep_last = 2;
  std::string resume = "no";
  std::int64_t sample_tokens = 400;
  double temperature = 0.8;
  std::optional<std::string> prompt;  ///< By default one that suits the default data.
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
/// Throw UsageError where options contradict each other, the number of ranks, or the data.
void validate(const Options& options);
void validate_ranks(const Options& options, std::int64_t ranks);
void validate_data(const Options& options, const Corpus& corpus);

/// Names, defaults and help on the command line.
void add_options(CLI::App& app, Options& options);
