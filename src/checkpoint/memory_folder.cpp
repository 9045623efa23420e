#include "checkpoint/memory_folder.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <utility>

#include "checkpoint/commit.h"
#include "checkpoint/step_names.h"
#include "fsdp/error.h"

namespace fsdp::ckpt {
namespace {

namespace fs = std::filesystem;

// Note [Leases of memory].
constexpr LeaseTimes kOfMemory = {.after_process = LeaseTimes().lasts};

/// Removes the folders beside `own` that no job has used for the time of a lease. Failures are ignored: they may belong to other users.
void remove_abandoned(const fs::path& own, FileSystem& files) {
  const fs::path around = parent_of(own);
  for (const std::string& name : list_folder(around, files)) {
    const fs::path folder = around / name;
    if (folder == own) continue;
    if (owner_of(folder, files, kOfMemory, std::chrono::system_clock::now(), kJobFile) != Owner::kGone) continue;
    try {
      MemoryFolder::remove(folder, files);
    } catch (const Error&) {
      // Another job may be removing it.
    }
  }
}

/// Makes the folder, and returns it unless something else is there, or it is in use.
fs::path usable(fs::path folder, FileSystem& files) {
  if (folder.empty()) throw Error("the path of the folder for steps in memory is empty; give a folder in tmpfs, such as /dev/shm/my-job");
  make_folders(folder, files);
  if (!is_there(folder / kJobFile, files)) {
    for (const std::string& name : list_folder(folder, files)) {
      if (name.starts_with(kTemporaryPrefix)) continue;  // the remains of a load, on a host that had lost its steps
      throw Error(folder.string() + " contains '" + name +
                  "' and belongs to no job: a saver removes what else is in its folder, so give it a folder of its own");
    }
  }
  if (const auto holder = holder_here(folder, kJobFile, files); !holder.empty()) {
    throw Error(folder.string() + " is in use by " + holder + ": end that job, or give this one another folder");
  }
  remove_abandoned(folder, files);
  return folder;
}

}  // namespace

MemoryFolder::MemoryFolder(fs::path folder, FileSystem& files)
    : path_(usable(std::move(folder), files)), lease_(path_, files, {}, kJobFile) {}

void MemoryFolder::keep_only(const std::vector<std::string>& steps, FileSystem& files) const {
  for (const std::string& name : list_folder(path_, files)) {
    if (name == kJobFile || std::find(steps.begin(), steps.end(), name) != steps.end()) continue;
    // Of a step, it removes the sidecar first, so that a step is there with all of its files or not at all.
    remove_tree(path_ / name, files);
  }
}

void MemoryFolder::remove(const fs::path& folder, FileSystem& files) {
  if (!is_there(folder, files)) return;
  for (const std::string& name : list_folder(folder, files)) {
    if (name != kJobFile) remove_tree(folder / name, files);
  }
  remove_tree(folder, files);
}

std::string place_of(const fs::path& folder, FileSystem& files) {
  fs::path there = folder, rest;
  struct stat status {};
  while (files.stat(there.c_str(), &status) != 0) {
    if (errno != ENOENT && errno != ENOTDIR) throw_errno("look at", there);
    if (!there.has_relative_path()) throw_errno("look at", folder);
    rest = there.filename() / rest;
    there = parent_of(there);
  }
  return this_kernel() + " " + std::to_string(status.st_dev) + " " + std::to_string(status.st_ino) + " " + rest.string();
}

}  // namespace fsdp::ckpt
