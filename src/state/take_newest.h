#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "state/ranks.h"

namespace fsdp::state {

/// The result of take_newest().
struct Taken {
  std::optional<std::string> path;   ///< The path of the checkpoint that was loaded; nothing if none was.
  std::vector<std::string> skipped;  ///< Newer checkpoints that were not taken, and why.
  std::string warning;               ///< A warning that this rank prints; empty if there is none.
};

/// Calls `load_one` with the newest complete checkpoint in a folder, as rank 0 sees it. Each time that it throws DamageError, calls it with
/// the checkpoint before. Collective. The warning names newer checkpoints that were not taken, on all ranks; on rank 0, it also reports
/// that there is no checkpoint. Throws Error if all are damaged, and what else `load_one` throws.
Taken take_newest(const std::string& folder, const CheckpointRanks& ranks, const std::function<void(const std::string& path)>& load_one);

}  // namespace fsdp::state
