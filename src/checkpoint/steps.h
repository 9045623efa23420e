#pragma once

#include <filesystem>
#include <optional>
#include <vector>

#include "checkpoint/files.h"

namespace fsdp::ckpt {

// The steps in a folder. Names with a number at the end, as "1000" or "step-1000", are steps; those with the same text before it are one
// series. Their order is the one in which they were saved (Sidecar::saved), not that of the numbers: a run that went back to an older step
// and saves again makes the newest ones.

/// The complete steps in a folder, oldest first. A folder that is not there has no steps.
std::vector<std::filesystem::path> complete_steps(const std::filesystem::path& folder, FileSystem& files = FileSystem::current());

/// The newest complete step, if there is any.
std::optional<std::filesystem::path> latest_step(const std::filesystem::path& folder, FileSystem& files = FileSystem::current());

/// Removes the complete steps of the series of `saved` but for `saved` itself and the newest of the others, so that `keep_last` stay, and
/// what processes that ended have left behind: hidden folders with an owner file whose lease nobody holds. Other series, incomplete steps
/// and whatever else is there stay; so do all steps if the name of `saved` has no number. To be called by one rank, after the commit of
/// `saved`. Other saves into the folder may be under way.
void prune_steps(const std::filesystem::path& saved, int keep_last, FileSystem& files = FileSystem::current());

}  // namespace fsdp::ckpt
