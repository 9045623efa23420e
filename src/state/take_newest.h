#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "state/ranks.h"

namespace fsdp::state {

/// What load_latest has come to.
struct Taken {
  std::optional<std::string> path;   ///< Of the checkpoint that was loaded; nothing where there is none.
  std::vector<std::string> skipped;  ///< Newer ones, and why.
  std::string warning;               ///< For every rank to tell, if it is not empty.
};

/// Calls `load_one` with the newest complete checkpoint in a folder, as rank 0 sees it, and with the one before it as long as that throws
/// DamageError. Collective. Throws Error if all are damaged, and what else `load_one` throws.
Taken take_newest(const std::string& folder, const Ranks& ranks, const std::function<void(const std::string& path)>& load_one);

}  // namespace fsdp::state
