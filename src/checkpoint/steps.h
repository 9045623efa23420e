#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/files.h"
#include "checkpoint/step_names.h"

namespace fsdp::ckpt {

// The steps in a folder. Names with a number at the end, as "1000" or "step-1000", are steps; those with the same text before it are one
// series. Their order is the one in which they were saved (Sidecar::saved), not that of the numbers: a run that went back to an older step
// and saves again makes the newest ones.

struct Step {
  enum class State : std::uint8_t {
    kComplete,
    kDamaged,  ///< Its sidecar is there, and says that something is missing; or is damaged itself.
    kForeign,  ///< It has metadata and no sidecar: written by Python, or without its sidecar.
  };
  std::filesystem::path path;
  StepName name;
  State state = State::kComplete;
  std::int64_t saved = 0;  ///< As Sidecar::saved; 0 if unknown.
  std::string fault;       ///< Of a damaged one.
};

/// All steps in a folder; or, with a stem, of that series. Complete ones stand in their order, oldest first. A folder that is not there has
/// none. Throws SystemError if it cannot be told of a step whether it is complete: that a disk does not answer does not make an older one
/// the newest.
std::vector<Step> find_steps(const std::filesystem::path& folder, const std::optional<std::string>& stem = {},
                             FileSystem& files = FileSystem::current());

/// The complete steps in a folder, oldest first. A folder that is not there has no steps.
std::vector<std::filesystem::path> complete_steps(const std::filesystem::path& folder, FileSystem& files = FileSystem::current());

/// The newest complete step, if there is any.
std::optional<std::filesystem::path> latest_step(const std::filesystem::path& folder, FileSystem& files = FileSystem::current());

/// Removes the complete steps of the series of `saved` but for `saved` itself and the newest of the others, so that `keep_last` stay, and
/// what processes that ended have left behind: hidden folders with an owner file whose lease nobody holds. Other series, incomplete steps
/// and whatever else is there stay; so do all steps if the name of `saved` has no number. To be called by one rank, after the commit of
/// `saved`. Other saves into the folder may be under way. What `keeps` gives stays as well: it is called with the complete steps of the
/// series, oldest first, `saved` among them.
using KeptSteps = std::function<std::vector<std::filesystem::path>(const std::vector<Step>& steps)>;
void prune_steps(const std::filesystem::path& saved, int keep_last, FileSystem& files = FileSystem::current(), const KeptSteps& keeps = {});

}  // namespace fsdp::ckpt
