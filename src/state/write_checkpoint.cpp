// Writes a checkpoint. Every rank writes its file, and rank 0 the files that join them.

#include <filesystem>
#include <optional>
#include <utility>

#include "checkpoint/commit.h"
#include "checkpoint/dcp_file.h"
#include "checkpoint/printable.h"
#include "checkpoint/steps.h"
#include "fsdp/error.h"
#include "state/rank_file.h"
#include "state/retention.h"
#include "state/snapshot.h"

namespace fsdp::state {
namespace fs = std::filesystem;

void write_checkpoint(const std::string& path, const Snapshot& snapshot, const SaveOptions& options, const CheckpointRanks& ranks,
                      Phases& phases, std::int64_t saved) {
  const std::string what = "the checkpoint " + path + " could not be written:";
  const bool leads = ranks.index() == 0;
  std::optional<ckpt::TemporaryStep> step;
  std::string part;
  fs::path replaced;
  try {
    ranks.together(what, [&] {
      check_retention(options);
      if (leads) step = ckpt::begin_step(path);
    });
    // A path has no zero byte.
    const auto told = ranks.broadcast(step ? step->path().string() + '\0' + path : "", "checkpoint: exchange of its folder");
    const fs::path folder = told.substr(0, told.find('\0'));
    const auto of_rank0 = told.substr(told.find('\0') + 1);
    ranks.together(what, [&] {
      if (path != of_rank0) {
        throw Error("was called with the path " + ckpt::printable(path) + ", and rank 0 " + ckpt::printable(of_rank0) +
                    ": a checkpoint is one folder, to which each rank adds a file; give the same path on all ranks");
      }
      auto written = write_records(folder, snapshot, ranks.index());
      part = std::move(written.text);
      phases.end(Phase::kWrite, written.listed.size);
    });
    const auto parts = ranks.gather(part, "checkpoint: list of what ranks wrote");
    ranks.together(what, [&] {
      if (!leads) return;
      auto [metadata, listed] = join_files(parts);
      auto& files = ckpt::FileSystem::current();
      ckpt::seal_dcp(folder, metadata, std::move(listed), files, ckpt::next_saved(ckpt::parent_of(folder), files, saved));
      replaced = ckpt::commit_step(folder, path);
    });
  } catch (...) {
    if (step) step->discard();
    throw;
  }
  phases.end(Phase::kCommit, 0);
  ranks.together("the checkpoint " + path + " is complete, but older ones could not be removed:", [&] {
    step.reset();
    if (!replaced.empty()) ckpt::remove_tree(replaced);
    if (!leads || options.keep_last == 0) return;
    const auto keeps = [&](const std::vector<ckpt::Step>& steps) { return steps_that_stay(options, steps); };
    ckpt::prune_steps(path, options.keep_last, ckpt::FileSystem::current(), keeps);
  });
  phases.end(Phase::kPrune, 0);
}

}  // namespace fsdp::state
