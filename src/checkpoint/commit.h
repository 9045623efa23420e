#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint/files.h"
#include "checkpoint/lease.h"

namespace fsdp::ckpt {

// How a step (a folder with a checkpoint) gets its name only when it is whole, and on the disk:
//
//   1. begin_step() makes a folder `.tmp-<name>-<random>` beside the target, with an owner file (lease.h). All ranks write their files into
//      it, each with SummedFile, which syncs it.
//   2. seal_step() writes the sidecar, which lists the files with sizes and checksums, and syncs the folder.
//   3. commit_step() gives the folder its name by one rename and syncs the parent. Where a step of that name is there, the two exchange
//      names, and the caller removes the old one.
//
// A process may end anywhere in between: before the rename, the old step (or none) is there and whole; after it, the new one. Some
// filesystems cannot exchange names (NFS, some FUSE ones). There the old step becomes `.old-<name>-<random>` first; if the process ends
// just then, complete_steps() finds it under that name, and prune_steps() gives it its own one back.

/// The sidecar. Python's DCP opens no file that its metadata do not name.
inline constexpr std::string_view kSidecar = ".fsdp-checksums";

/// Files are summed in blocks of so many bytes, counted from their beginning (the last one is what is left), so that who needs a part of a
/// file reads and checks little more than that. A block stays in the processor's cache from the sum to the write, and from the read to the
/// sum. Files are read in pieces of this size, too, by few system calls.
inline constexpr std::int64_t kSummedBlock = std::int64_t{1} << 20;

/// A checkpoint's bytes are not those that were written, or not all of them.
class DamageError : public Error {
 public:
  using Error::Error;
};

struct ListedFile {
  std::string name;  ///< In the step's folder.
  std::int64_t size = 0;
  std::vector<std::uint32_t> crc32 = {};  ///< Of each block.

  bool operator==(const ListedFile&) const = default;
};

/// A line for a listed file, by which ranks tell each other, and back (without the end of the line). Throw Error for a name that is none in
/// a folder, and a line that is none.
std::string line_of(const ListedFile& listed);
ListedFile listed_in(std::string_view line);

/// A file of a step, written from front to back and summed as it is. One thread at a time.
class SummedFile {
 public:
  SummedFile(const std::filesystem::path& folder, std::string name, FileSystem& files = FileSystem::current());

  /// Bytes so far.
  std::int64_t size() const { return listed_.size; }
  /// Returns the data's CRC-32, for a record's tail: it is computed once, for this and for the block. Small pieces are joined before they
  /// are written.
  std::uint32_t append(std::span<const char> data);
  /// Writes what waits, syncs and closes it.
  ListedFile finish();

 private:
  void write(std::span<const char> data);
  void flush();

  File file_;
  ListedFile listed_;
  std::string waiting_;
  std::int64_t written_ = 0;
  std::int64_t started_ = 0;  // bytes that the disk was told to write
};

/// A folder that a step is written into. As long as this lives, nobody takes the folder for a leftover, nor the step after its commit, nor
/// what waits to be replaced by it.
class TemporaryStep {
 public:
  TemporaryStep(std::filesystem::path path, Lease lease) : path_(std::move(path)), lease_(std::move(lease)) {}
  const std::filesystem::path& path() const { return path_; }
  /// Gives the lease up and removes the folder, as far as it goes: the error that made this necessary is on its way.
  void discard() noexcept;

 private:
  std::filesystem::path path_;
  std::optional<Lease> lease_;
};

/// Makes the folder to write a step into, and the folders that lead to `target` where they are missing. One rank calls this. Throws Error
/// if something other than a checkpoint or an empty folder is at `target`; so does commit_step().
TemporaryStep begin_step(const std::filesystem::path& target, FileSystem& files = FileSystem::current());
/// One rank calls this, when all have finished their files: `listed` are all of them.
void seal_step(const std::filesystem::path& temporary, std::span<const ListedFile> listed, FileSystem& files = FileSystem::current());
/// Where the step that was at `target` is now, for remove_tree(); empty if there was none. If it throws, what was at `target` still is.
std::filesystem::path commit_step(const std::filesystem::path& temporary, const std::filesystem::path& target,
                                  FileSystem& files = FileSystem::current());

/// The same for what replaces nothing: an export, a conversion. Throw Error if anything but an empty folder is at `target`. The owner file
/// goes with the commit, as nothing removes such a folder.
TemporaryStep begin_new(const std::filesystem::path& target, FileSystem& files = FileSystem::current());
void commit_new(const std::filesystem::path& temporary, const std::filesystem::path& target, FileSystem& files = FileSystem::current());

/// What the sidecar's head says of a file. Its checksums are elsewhere in the sidecar: who reads a file or two of thousands reads theirs.
struct SidecarEntry {
  std::string name;
  std::int64_t size = 0;
  std::int64_t sums_begin = 0;   ///< In the sidecar: a little-endian number of 4 bytes per block.
  std::uint32_t sums_crc32 = 0;  ///< Of these.

  bool operator==(const SidecarEntry&) const = default;
};

/// A sidecar's head.
struct Sidecar {
  std::int64_t saved =
      0;  ///< Of two steps in a folder, the one that was saved later has the greater number (as a rule, nanoseconds of UTC).
  std::vector<SidecarEntry> files;

  bool operator==(const Sidecar&) const = default;
};
/// Throw DamageError if it is damaged, or is not as long as it says. The former is for a sidecar of `size` bytes, which messages call
/// `file`.
Sidecar read_sidecar(const ReadAt& read, std::int64_t size, const std::string& file);
Sidecar read_sidecar(const std::filesystem::path& step, FileSystem& files = FileSystem::current());

/// A file's checksums. Throws DamageError if they are damaged.
ListedFile read_sums(const std::filesystem::path& step, const SidecarEntry& entry, FileSystem& files = FileSystem::current());

/// What is wrong with a step: its sidecar is missing or damaged, or something that it lists is missing or has another size. Empty if
/// nothing is. Contents are not read: see verify_step(). Throws SystemError if the system does not let it be told.
std::string fault_in_sizes(const std::filesystem::path& step, FileSystem& files = FileSystem::current());
/// The same of what a sidecar lists that has been read.
std::string fault_in_sizes(const std::filesystem::path& step, const Sidecar& sidecar, FileSystem& files = FileSystem::current());
inline bool is_complete(const std::filesystem::path& step, FileSystem& files = FileSystem::current()) {
  return fault_in_sizes(step, files).empty();
}

/// Reads bytes, and goes on with their checksum. Throws Error if they cannot be read.
std::uint32_t read_summed(const File& file, std::int64_t offset, std::span<char> to, std::uint32_t sum);

/// How many blocks a file of `size` bytes has.
std::int64_t blocks_of(std::int64_t size);
/// Reads a block of a file of `size` bytes, part by part through `scratch`, and returns its checksum. Throws Error if the block cannot be
/// read.
std::uint32_t sum_of_block(const File& file, std::int64_t size, std::size_t block, std::span<char> scratch);
/// What is wrong with a block of a listed file that has the checksum `sum`: empty, or that this is another one than listed.
std::string fault_in_block(const ListedFile& listed, std::size_t block, std::uint32_t sum);

/// What is wrong with a listed file, which is read: missing, too short or long, the first damaged block. Empty if nothing is.
std::string fault_in(const std::filesystem::path& step, const SidecarEntry& entry, FileSystem& files = FileSystem::current());

/// Reads all files of a step. Throws one DamageError that lists all that is missing, too short or long, or damaged.
void verify_step(const std::filesystem::path& step, FileSystem& files = FileSystem::current());

}  // namespace fsdp::ckpt
