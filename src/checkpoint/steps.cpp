#include "checkpoint/steps.h"

#include <algorithm>
#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "checkpoint/commit.h"
#include "checkpoint/dcp_metadata.h"
#include "checkpoint/lease.h"
#include "checkpoint/output_file.h"
#include "checkpoint/step_names.h"
#include "fsdp/error.h"

namespace fsdp::ckpt {
namespace {

namespace fs = std::filesystem;

/// Returns the checkpoint at `path`; nothing if there is none.
std::optional<Step> step_at(const fs::path& path, const std::optional<StepName>& name, FileSystem& files) {
  Step step{.path = path, .name = name.value_or(StepName()), .fault = {}};
  if (!is_there(path / kSidecar, files)) {
    step.state = Step::State::kForeign;
    return is_there(path / kMetadataFile, files) ? std::optional(step) : std::nullopt;
  }
  try {
    const Sidecar sidecar = read_sidecar(path, files);
    step.saved = sidecar.saved;
    step.fault = fault_in_sizes(path, sidecar, files);
  } catch (const DamageError& error) {
    step.fault = error.what();
  } catch (const SystemError& error) {
    if (!error.is_missing()) throw;
    return std::nullopt;  // Another process has removed it just now.
  }
  if (step.fault.empty()) {
    if (!name) step.state = Step::State::kUnnumbered;
    return step;
  }
  if (!is_there(path / kSidecar, files)) return std::nullopt;  // The same: the missing file was removed with the step.
  step.state = Step::State::kDamaged;
  return step;
}

/// Returns false if another process has renamed or removed `from` meanwhile.
bool rename_if_there(const fs::path& from, const fs::path& to, FileSystem& files) {
  try {
    rename_to(from, to, 0, files);
    return true;
  } catch (const SystemError& error) {
    if (!error.is_missing()) throw;
    return false;
  }
}

/// Gives the folder at `path` a temporary name, so that it is no longer a step, and adds it to those that will be removed.
void hide(const fs::path& path, std::vector<fs::path>& hidden, FileSystem& files) {
  fs::path name = hidden_name(path, kTemporaryPrefix);
  if (rename_if_there(path, name, files)) hidden.push_back(std::move(name));
}

/// The step's name of a folder, hidden or not.
std::string own_name(const std::string& entry) {
  for (const std::string_view prefix : {kTemporaryPrefix, kReplacedPrefix}) {
    if (const std::string_view name = name_in(entry, prefix); !name.empty()) return std::string(name);
  }
  return entry;
}

/// Returns the hidden folders of writers that have ended, all with temporary names. Gives a step that waited to be replaced its name back.
std::vector<fs::path> find_leftovers(const fs::path& folder, FileSystem& files) {
  std::vector<fs::path> leftovers;
  const std::vector<std::string> entries = list_folder(folder, files);
  // The writer of a step may need all of its hidden folders to undo a failed commit, so they stay until it has finished.
  std::set<std::string> being_written;
  for (const std::string& entry : entries) {
    if (owner_of(folder / entry, files) == Owner::kWriting) being_written.insert(own_name(entry));
  }
  for (const std::string& entry : entries) {
    const std::string name = own_name(entry);
    if (name == entry || being_written.contains(name) || owner_of(folder / entry, files) != Owner::kGone) continue;
    if (!name_in(entry, kTemporaryPrefix).empty()) {
      leftovers.push_back(folder / entry);
    } else if (!is_there(folder / name, files) && is_complete(folder / entry, files)) {
      rename_if_there(folder / entry, folder / name, files);
    } else {
      hide(folder / entry, leftovers, files);
    }
  }
  return leftovers;
}

}  // namespace

std::vector<Step> find_steps(const fs::path& folder, const std::optional<std::string>& stem, FileSystem& files) {
  if (!is_there(folder, files)) return {};
  std::vector<Step> steps;
  for (const std::string& entry : list_folder(folder, files)) {
    std::string name = entry;
    if (const std::string_view replaced = name_in(entry, kReplacedPrefix); !replaced.empty()) {
      name = replaced;
      if (is_there(folder / name, files)) continue;
    } else if (entry.starts_with('.')) {
      continue;
    }
    const std::optional<StepName> parts = step_name(name);
    if (stem && (!parts || parts->stem != *stem)) continue;
    if (std::optional<Step> step = step_at(folder / entry, parts, files)) steps.push_back(*std::move(step));
  }
  std::sort(steps.begin(), steps.end(), [](const Step& a, const Step& b) {
    return std::tie(a.saved, a.name.number, a.name.stem) < std::tie(b.saved, b.name.number, b.name.stem);
  });
  return steps;
}

std::vector<fs::path> complete_steps(const fs::path& folder, FileSystem& files) {
  std::vector<fs::path> paths;
  for (Step& step : find_steps(folder, {}, files)) {
    if (step.state == Step::State::kComplete) paths.push_back(std::move(step.path));
  }
  return paths;
}

std::optional<fs::path> latest_step(const fs::path& folder, FileSystem& files) {
  const std::vector<fs::path> steps = complete_steps(folder, files);
  if (steps.empty()) return std::nullopt;
  return steps.back();
}

void prune_steps(const fs::path& saved, int keep_last, FileSystem& files, const KeptSteps& keeps) {
  if (keep_last < 1) throw Error("keep_last is " + std::to_string(keep_last) + "; give 1 or more: the newest checkpoint is not removed");
  const fs::path kept = follow_links(saved, files);
  const fs::path folder = parent_of(kept);
  std::vector<fs::path> doomed = find_leftovers(folder, files);
  if (const std::optional<StepName> series = step_name(kept.filename().string())) {
    std::vector<Step> steps = find_steps(folder, series->stem, files);
    std::erase_if(steps, [](const Step& step) { return step.state != Step::State::kComplete; });
    const std::vector<fs::path> others_kept = keeps ? keeps(steps) : std::vector<fs::path>();
    std::erase_if(steps, [&](const Step& step) { return step.path.filename() == kept.filename(); });
    const std::size_t others = std::min(steps.size(), static_cast<std::size_t>(keep_last) - 1);
    steps.resize(steps.size() - others);
    for (const Step& step : steps) {
      if (std::find(others_kept.begin(), others_kept.end(), step.path) == others_kept.end()) hide(step.path, doomed, files);
    }
  }
  if (doomed.empty()) return;
  sync_folder(folder, files);  // Otherwise a loss of power might leave steps with missing files.
  for (const fs::path& path : doomed) remove_tree(path, files);
}

}  // namespace fsdp::ckpt
