#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "checkpoint/files.h"

namespace fsdp::ckpt {

struct LeaseTimes {
  std::chrono::milliseconds renewed = std::chrono::minutes(1);  ///< The time between renewals.
  std::chrono::milliseconds lasts =
      std::chrono::minutes(30);  ///< How long a lease is valid after a renewal. Clocks may differ by half of this time.
  /// How long it is valid after a renewal if its process is known to have ended. By default, it ends with its process.
  std::optional<std::chrono::milliseconds> after_process = {};
};

/// During its lifetime, the folder's owner file (kOwnerFile) shows other threads, processes and machines that the folder is being written.
/// A thread of its own renews the time stamp in the file; failures of a renewal are ignored. Movable.
class Lease {
 public:
  /// Writes the file, under another name if one is given. Throws Error.
  explicit Lease(const std::filesystem::path& folder, FileSystem& files = FileSystem::current(), LeaseTimes times = {},
                 std::string_view name = kOwnerFile);
  /// Ends the lease. The file stays.
  ~Lease();
  Lease(Lease&&) noexcept;
  Lease& operator=(Lease&&) noexcept;

 private:
  struct Renewal;
  std::unique_ptr<Renewal> renewal_;
};

enum class Owner : std::uint8_t {
  kUnknown,  ///< The folder has no readable owner file of this library, so it may belong to something else.
  kWriting,  ///< A lease is held.
  kGone,     ///< The writer has finished, or its process has ended, or it has not renewed its lease in time.
};
/// Finds out whether the folder is being written. If the writer is on this machine, its process is looked up; otherwise the time stamp
/// decides.
Owner owner_of(const std::filesystem::path& folder, FileSystem& files = FileSystem::current(), LeaseTimes times = {},
               std::chrono::system_clock::time_point now = std::chrono::system_clock::now(), std::string_view name = kOwnerFile);
/// Describes the process of this machine that holds the lease, for errors: "process 123". Empty if none is known to hold it.
std::string holder_here(const std::filesystem::path& folder, std::string_view name = kOwnerFile, FileSystem& files = FileSystem::current());

/// Identifies the running kernel. If it is unknown, each call returns another text.
std::string this_kernel();

}  // namespace fsdp::ckpt
