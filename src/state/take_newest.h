#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "state/memory_steps.h"
#include "state/ranks.h"

namespace fsdp::state {

/// The result of take_newest().
struct Taken {
  std::optional<std::string> path;   ///< The path of the checkpoint that was loaded; nothing if none was.
  std::string origin;                ///< Loaded::origin.
  std::vector<std::string> skipped;  ///< Newer checkpoints that were not taken, and why.
  std::string warning;               ///< A warning that this rank prints; empty if there is none.
};

/// Loads a checkpoint: the one at `path`, or, unless it is null, a step in memory.
using LoadOne = std::function<void(const std::string& path, HeldStep* held)>;

/// Calls `load_one` with the newest complete checkpoint: in the last of the folders, as rank 0 sees it, or in the memory of hosts, which
/// the other folders are. Each time that it throws DamageError, calls it with the checkpoint before, or with the same step in memory
/// without the damaged files. Collective. The warning names newer checkpoints that were not taken, on all ranks; on rank 0, it also reports
/// that there is no checkpoint. Throws Error if all are damaged, and what else `load_one` throws.
Taken take_newest(const std::vector<std::string>& folders, const CheckpointRanks& ranks, const LoadOne& load_one);

}  // namespace fsdp::state
