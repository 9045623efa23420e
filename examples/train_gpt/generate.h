#pragma once

#include <fsdp/device_mesh.h>

#include <cstdint>
#include <future>
#include <optional>
#include <string>

#include "gpt.h"
#include "train_gpt/options.h"
#include "train_gpt/report.h"

/// Writes text with the weights of a sharded model. Rank 0 has an ordinary copy of the model, which takes memory for all parameters, and
/// generates alone, with a cache of keys and values: one text beside the steps of training that follow, if it is asked for so.
class Writer {
 public:
  /// What is given must outlive this.
  Writer(const Options& options, const fsdp::DeviceMesh& mesh) : options_(options), mesh_(mesh) {}

  /// Each --sample-every steps: takes the model's weights, and begins a text. Reports the text before when it is there, and waits for it
  /// before the copy takes other weights. Collective.
  void after_step(std::int64_t step, GPT& model, Report& report);
  /// What the model writes now after --prompt, at most --sample-tokens bytes; equal seeds give equal texts. On rank 0; "" on the others.
  /// Reports a text that is still being written. Collective.
  std::string write(GPT& model, Report* report = nullptr);

 private:
  void take_weights(GPT& model);
  std::string text();
  void report_text(Report& report);

  const Options& options_;
  const fsdp::DeviceMesh& mesh_;
  std::optional<GPT> copy_;           // on rank 0, from the first text on
  std::int64_t step_ = 0;             // of the weights that it has
  std::future<std::string> written_;  // after copy_, which it uses: destroying it waits
};

/// The program under --generate: prints what the best checkpoint of a run writes, or the newest. Collective. Returns the exit code.
int generate_from_run(const Options& options, const fsdp::DeviceMesh& mesh);
