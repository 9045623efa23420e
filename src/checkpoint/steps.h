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

// The steps in a folder. Folders whose names end in a number, such as "1000" or "step-1000", are steps. Steps with the same text before the
// number form a series. Steps are ordered by when they were saved (Sidecar::saved), not by number: if a run goes back to an older step and
// saves again, these steps are the newest ones.

struct Step {
  enum class State : std::uint8_t {
    kComplete,
    kDamaged,     ///< Its sidecar exists, but a file that it lists is missing, or the sidecar is damaged.
    kForeign,     ///< It has metadata and no sidecar, as checkpoints that Python wrote.
    kUnnumbered,  ///< A complete checkpoint whose name does not end in a number. It is no step; its name has an empty stem.
  };
  std::filesystem::path path;
  StepName name;
  State state = State::kComplete;
  std::int64_t saved = 0;  ///< Sidecar::saved; 0 if it is not known.
  std::string fault;       ///< What is wrong with a damaged step.
};

/// Returns all checkpoints in a folder, or, with a stem, the steps of that series, sorted, the oldest first. A folder that does not exist
/// has none. Throws SystemError if the system does not allow to find out whether a step is complete, so that a disk error
/// never makes an older step the newest one.
std::vector<Step> find_steps(const std::filesystem::path& folder, const std::optional<std::string>& stem = {},
                             FileSystem& files = FileSystem::current());

/// The complete steps in a folder, oldest first. A folder that is not there has no steps.
std::vector<std::filesystem::path> complete_steps(const std::filesystem::path& folder, FileSystem& files = FileSystem::current());

/// The newest complete step, if there is any.
std::optional<std::filesystem::path> latest_step(const std::filesystem::path& folder, FileSystem& files = FileSystem::current());

/// Removes older complete steps of the series of `saved`, so that `keep_last` steps stay: `saved` itself and the newest of the others.
/// Steps that `keeps` returns stay as well; it is called with all complete steps of the series, oldest first. Also removes hidden folders
/// that ended processes have left behind, that is, those with an owner file whose lease no process holds. Other series, incomplete steps
/// and all other files stay. If the name of `saved` has no number, all steps stay. One rank calls this, after the commit of `saved`. Other
/// saves into the folder may be under way.
using KeptSteps = std::function<std::vector<std::filesystem::path>(const std::vector<Step>& steps)>;
void prune_steps(const std::filesystem::path& saved, int keep_last, FileSystem& files = FileSystem::current(), const KeptSteps& keeps = {});

}  // namespace fsdp::ckpt
