#pragma once

#include <cstdint>
#include <optional>
#include <string>

// The options of finetune_llama: their names and help on the command line.

namespace llama {

struct FinetuneOptions {
  std::string model, data, out;
  int nproc = 2;
  std::string device = "cpu";
  std::int64_t steps = 100;
  std::int64_t batch = 8;
  std::int64_t context = 512;
  std::int64_t warmup = 10;
  double lr = 1e-5;
  double weight_decay = 0;
  double clip = 1;
  std::uint64_t seed = 1;
  std::string dtype = "fp32";
  bool recompute = false;
  std::string checkpoints;
  std::int64_t save_every = 100;
};

/// Reads the command line. Returns the exit code if the program is to end here: it has printed help, or one line about an error.
std::optional<int> parse(int argc, char** argv, FinetuneOptions& options);

}  // namespace llama
