#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/files.h"
#include "checkpoint/lease.h"

namespace fsdp::ckpt {

/// The lease of a folder for steps in memory. Only folders that contain it are removed.
inline constexpr std::string_view kJobFile = ".fsdp-job";

/// A folder in memory (tmpfs) with the steps of one job on this host. The folder's name stands for the job. One process of the host holds
/// it. It outlives this object and its process, so that a restart finds the steps.
///
/// [Note: Leases of memory] A lease lasts for half an hour after the last renewal, also if its process has ended, because its job may be
/// about to restart. Until then, only the job itself uses the folder. After that, any other job that starts on this host removes it.
class MemoryFolder {
 public:
  /// Makes the folder and takes its lease. Removes the folders beside it whose leases have ended. Throws Error if the folder contains
  /// something else than a job's steps, or if a running process of this host holds its lease.
  explicit MemoryFolder(std::filesystem::path folder, FileSystem& files = FileSystem::current());

  const std::filesystem::path& path() const { return path_; }
  /// Removes all steps but those of these names, and the remains of saves and loads that processes did not end.
  void keep_only(const std::vector<std::string>& steps, FileSystem& files = FileSystem::current()) const;

  /// Removes the folder with all that it contains, its lease last, so that a removal that did not end can be completed.
  static void remove(const std::filesystem::path& folder, FileSystem& files = FileSystem::current());

 private:
  std::filesystem::path path_;
  Lease lease_;
};

/// Returns a text that is equal for two processes if and only if they see the same folder at their paths: the kernel, the file system, and
/// the place of the folder in it. The folder need not exist.
std::string place_of(const std::filesystem::path& folder, FileSystem& files = FileSystem::current());

}  // namespace fsdp::ckpt
