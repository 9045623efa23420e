#pragma once

#include <fsdp/device_mesh.h>

#include <cstdint>
#include <optional>
#include <string>

#include "train_gpt/options.h"

/// The folder of one run: config.json, log.jsonl, losses.svg and checkpoints/.
class RunFolder {
 public:
  /// --run, or runs/<date>-<time> with a number behind it where that is taken. Rank 0 makes it and writes the configuration. Collective.
  /// Throws UsageError on every rank if that failed.
  RunFolder(const Options& options, const fsdp::DeviceMesh& mesh);

  const std::string& path() const { return path_; }
  const std::string& log() const { return log_; }
  std::string plot() const { return path_ + "/losses.svg"; }
  const std::string& checkpoints() const { return checkpoints_; }
  std::string checkpoint(std::int64_t step) const { return checkpoints_ + "/" + checkpoint_name_ + "-" + std::to_string(step); }

 private:
  std::string path_, log_, checkpoints_, checkpoint_name_;
};

/// The run's folder; nothing, after rank 0 has said in one line why, if the options do not fit the ranks or the folder cannot be made.
/// Collective.
std::optional<RunFolder> open_run(const Options& options, const fsdp::DeviceMesh& mesh);

/// Where a run saves: --save, or checkpoints/ in its folder.
std::string checkpoints_of(const Options& options, const std::string& folder);
