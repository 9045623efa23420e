#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>

#include "checkpoint/files.h"

namespace fsdp::ckpt {

struct LeaseTimes {
  std::chrono::milliseconds renewed = std::chrono::minutes(1);  ///< So often.
  std::chrono::milliseconds lasts = std::chrono::minutes(30);   ///< So long after a renewal. Clocks may differ by half of it.
};

/// Says by the folder's owner file (kOwnerFile) that it is being written, as long as this lives: to other threads, other processes, and
/// other machines, which cannot be asked. A thread of its own renews the stamp; a renewal that fails is left out. Movable.
class Lease {
 public:
  /// Writes the file. Throws Error.
  explicit Lease(const std::filesystem::path& folder, FileSystem& files = FileSystem::current(), LeaseTimes times = {});
  /// The file stays.
  ~Lease();
  Lease(Lease&&) noexcept;
  Lease& operator=(Lease&&) noexcept;

 private:
  struct Renewal;
  std::unique_ptr<Renewal> renewal_;
};

enum class Owner : std::uint8_t {
  kUnknown,  ///< No owner file of this library can be read there: somebody else's folder, perhaps.
  kWriting,  ///< A lease is held.
  kGone,     ///< The writer has finished, or its process has ended, or it has not renewed its lease in time.
};
/// A writer of this machine is looked up; of one elsewhere, the stamp decides.
Owner owner_of(const std::filesystem::path& folder, FileSystem& files = FileSystem::current(), LeaseTimes times = {},
               std::chrono::system_clock::time_point now = std::chrono::system_clock::now());

}  // namespace fsdp::ckpt
