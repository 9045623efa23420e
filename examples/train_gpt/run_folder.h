#pragma once

#include <fsdp/device_mesh.h>
#include <sys/file.h>

#include <cstdint>
#include <optional>
#include <string>

#include "train_gpt/options.h"

/// Keeps other processes from training in the folder of a run. The system lets go of it when this process ends, in whatever way.
class RunLock {
 public:
  /// Throws UsageError if another process holds it. With LOCK_SH it only looks, as several ranks may do at once.
  explicit RunLock(const std::string& folder, int kind = LOCK_EX);
  ~RunLock();
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;

  /// Leaves word for the errors of others.
  void sign() const;

 private:
  int fd_ = -1;
};

/// The folder of one run: config.json, log.jsonl, losses.svg and checkpoints/, with --timeline also timeline.html and events/, and .lock,
/// which a process that trains in it holds.
class RunFolder {
 public:
  /// --run, or a new one, which begin() makes. Of a run that is there, nothing changes before begin(); from now on it is locked, by rank 0.
  /// Collective. Throws UsageError on rank 0 alone.
  RunFolder(const Options& options, const fsdp::DeviceMesh& mesh);

  /// The run begins, or goes on: rank 0 makes the folder and writes the configuration. Without --run, it is runs/<date>-<time> with a
  /// number behind it where that is taken. Collective. Throws UsageError on rank 0 alone.
  void begin(const Options& options, const fsdp::DeviceMesh& mesh);

  const std::string& path() const { return path_; }
  const std::string& log() const { return log_; }
  std::string plot() const { return path_ + "/losses.svg"; }
  std::string events() const { return path_ + "/events"; }
  std::string timeline() const { return path_ + "/timeline.html"; }
  const std::string& checkpoints() const { return checkpoints_; }
  std::string checkpoint(std::int64_t step) const { return checkpoints_ + "/" + checkpoint_name_ + "-" + std::to_string(step); }

 private:
  void name(const Options& options, std::string path);

  std::string path_, log_, checkpoints_, checkpoint_name_;
  std::optional<RunLock> lock_;  // of rank 0
};

/// Where a run saves: --save, or checkpoints/ in its folder.
std::string checkpoints_of(const Options& options, const std::string& folder);

/// Throws UsageError if another process trains in the folder, or if it could not be made. Changes nothing.
void check_folder(const Options& options);

/// True if no rank has an error; otherwise one that has one says so, in one line. Collective.
bool nobody_refuses(const fsdp::DeviceMesh& mesh, const std::string& error);

/// Runs what may throw UsageError on some ranks, and returns true on all of them if it did on none. Collective.
template <typename Function>
bool all_accept(const fsdp::DeviceMesh& mesh, const Function& function) {
  std::string error;
  try {
    function();
  } catch (const UsageError& refusal) {
    error = refusal.what();
  }
  return nobody_refuses(mesh, error);
}
