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

// A step (a folder with a checkpoint) gets its name only when it is complete, and on the disk:
//
//   1. begin_step() makes a folder `.tmp-<name>-<random>` beside the target, with an owner file (lease.h). All ranks write their files into
//      it, each with SummedFile, which syncs it.
//   2. seal_step() writes the sidecar, which lists the files with sizes and checksums, and syncs the folder.
//   3. commit_step() gives the folder its name by one rename and syncs the parent. Where a step of that name is there, the two exchange
//      names, and the caller removes the old one.
//
// A process may end at any point: before the rename, the old step (if any) exists and is complete; after it, the new one. Some filesystems
// cannot exchange names (NFS, some FUSE ones). There the old step becomes `.old-<name>-<random>` first; if the process ends just then,
// complete_steps() finds it under that name, and prune_steps() gives it its own one back.

/// The sidecar. Python's DCP opens no file that its metadata do not name.
inline constexpr std::string_view kSidecar = ".fsdp-checksums";

/// Files are summed in blocks of this many bytes, counted from their beginning (the last block may be shorter), so that a reader of a part
/// of a file reads and checks little more than that part. A block stays in the processor's cache from the sum to the write, and from the
/// read to the sum. Files are read in pieces of this size, too, by few system calls.
inline constexpr std::int64_t kSummedBlock = std::int64_t{1} << 20;

/// A checkpoint's bytes are not those that were written, or not all of them.
class DamageError : public Error {
 public:
  using Error::Error;
};

struct ListedFile {
  std::string name;  ///< In the step's folder.
  std::int64_t size = 0;
  std::vector<std::uint32_t> crc32 = {};  ///< The checksum of each block.

  bool operator==(const ListedFile&) const = default;
};

/// Converts a listed file to a line of text, in which form ranks send it to each other, and back (without the end of the line). Throw Error
/// for a name that is not the name of a file in the folder, and for a line that was not written in this way.
std::string line_of(const ListedFile& listed);
ListedFile listed_in(std::string_view line);

/// A file of a step. It is written from front to back, and its checksums are computed in the same pass. One thread at a time.
class SummedFile {
 public:
  SummedFile(const std::filesystem::path& folder, std::string name, FileSystem& files = FileSystem::current());

  /// Bytes so far.
  std::int64_t size() const { return listed_.size; }
  /// Appends data and returns their CRC-32, which a record's tail needs. The same computation serves the checksum of the block. Small
  /// pieces are joined before they are written.
  std::uint32_t append(std::span<const char> data);
  /// Writes the data that have been joined but not written, syncs the file, and closes it.
  ListedFile finish();

 private:
  void write(std::span<const char> data);
  void flush();

  File file_;
  ListedFile listed_;
  std::string waiting_;
  std::int64_t written_ = 0;
  std::int64_t started_ = 0;  // bytes for which writing to the disk was started
};

/// A folder that a step is written into. During the lifetime of this object, no process removes the folder as a leftover. The same applies
/// to the step after its commit, and to the older step that waits to be replaced by it.
class TemporaryStep {
 public:
  TemporaryStep(std::filesystem::path path, Lease lease) : path_(std::move(path)), lease_(std::move(lease)) {}
  const std::filesystem::path& path() const { return path_; }
  /// Gives up the lease and removes the folder as far as possible. Errors are ignored, because the error that made this necessary is about
  /// to be reported.
  void discard() noexcept;

 private:
  std::filesystem::path path_;
  std::optional<Lease> lease_;
};

/// Makes a folder, and the folders that lead to it, where they are missing. Throws Error.
void make_folders(const std::filesystem::path& path, FileSystem& files = FileSystem::current());

/// Makes the folder to write a step into, and the folders that lead to `target` where they are missing. One rank calls this. Throws Error
/// if something other than a checkpoint or an empty folder is at `target`; so does commit_step().
TemporaryStep begin_step(const std::filesystem::path& target, FileSystem& files = FileSystem::current());
/// One rank calls this, when all have finished their files: `listed` are all of them. `saved` is Sidecar::saved; 0: next_saved() of the
/// folder around.
void seal_step(const std::filesystem::path& temporary, std::span<const ListedFile> listed, FileSystem& files = FileSystem::current(),
               std::int64_t saved = 0);

/// Returns a number for Sidecar::saved: the time, or, whatever the clock shows, more than all numbers that this process has returned or
/// noted. Any thread.
std::int64_t new_saved();
/// Notes that this process has loaded the step with this number, so that the steps that it saves from now on are newer.
void note_saved(std::int64_t saved);
/// Returns a number that is greater than that of any step in the folder, whatever the clocks of the machines that wrote them: `saved`, if
/// it is one; 0: new_saved().
std::int64_t next_saved(const std::filesystem::path& folder, FileSystem& files = FileSystem::current(), std::int64_t saved = 0);
/// Gives the step its name. Returns the path to which the step that was at `target` has been moved, for remove_tree(); empty if there was
/// none. If it throws, `target` is unchanged.
std::filesystem::path commit_step(const std::filesystem::path& temporary, const std::filesystem::path& target,
                                  FileSystem& files = FileSystem::current());

/// Begin and commit folders that replace nothing, such as an export or a conversion. Throw Error if anything but an empty folder is at
/// `target`. The commit removes the owner file, because such folders are never removed later.
TemporaryStep begin_new(const std::filesystem::path& target, FileSystem& files = FileSystem::current());
void commit_new(const std::filesystem::path& temporary, const std::filesystem::path& target, FileSystem& files = FileSystem::current());

/// The entry of a file in the head of the sidecar. The checksums are in another part of the sidecar, so that a program which reads a few of
/// thousands of files reads only their checksums.
struct SidecarEntry {
  std::string name;
  std::int64_t size = 0;
  std::int64_t sums_begin = 0;   ///< Where its checksums begin in the sidecar: a little-endian number of 4 bytes for each block.
  std::uint32_t sums_crc32 = 0;  ///< The checksum of these numbers.

  bool operator==(const SidecarEntry&) const = default;
};

/// A sidecar's head.
struct Sidecar {
  std::int64_t saved = 0;  ///< Orders the steps of a folder: a step that was saved later has a greater number (usually nanoseconds of UTC).
  std::vector<SidecarEntry> files;

  bool operator==(const Sidecar&) const = default;
};
/// Read a sidecar's head, from `read` and from a step's folder. The sidecar that `read` gives has `size` bytes and is called `file` in
/// messages. Throw DamageError if it is damaged, or if its length is not the one that it states.
Sidecar read_sidecar(const ReadAt& read, std::int64_t size, const std::string& file);
Sidecar read_sidecar(const std::filesystem::path& step, FileSystem& files = FileSystem::current());

/// A file's checksums. Throws DamageError if they are damaged.
ListedFile read_sums(const std::filesystem::path& step, const SidecarEntry& entry, FileSystem& files = FileSystem::current());

/// Describes what is wrong with a step: its sidecar is missing or damaged, or a file that it lists is missing or has another size. Empty if
/// nothing is wrong. Contents are not read; see verify_step(). Throws SystemError if the system does not allow to find out.
std::string fault_in_sizes(const std::filesystem::path& step, FileSystem& files = FileSystem::current());
/// Does so for a sidecar that has been read already.
std::string fault_in_sizes(const std::filesystem::path& step, const Sidecar& sidecar, FileSystem& files = FileSystem::current());
inline bool is_complete(const std::filesystem::path& step, FileSystem& files = FileSystem::current()) {
  return fault_in_sizes(step, files).empty();
}

/// Reads bytes and returns `sum` continued by them. Throws Error if they cannot be read.
std::uint32_t read_summed(const File& file, std::int64_t offset, std::span<char> to, std::uint32_t sum);

/// How many blocks a file of `size` bytes has.
std::int64_t blocks_of(std::int64_t size);
/// Reads a block of a file of `size` bytes, part by part through `scratch`, and returns its checksum. Throws Error if the block cannot be
/// read.
std::uint32_t sum_of_block(const File& file, std::int64_t size, std::size_t block, std::span<char> scratch);
/// Compares the checksum `sum` of a block of a listed file with the listed one. Returns the message if they differ; otherwise empty.
std::string fault_in_block(const ListedFile& listed, std::size_t block, std::uint32_t sum);

/// Reads a listed file and describes what is wrong with it: it is missing, too short or too long, or which block is the first damaged one.
/// Empty if nothing is wrong.
std::string fault_in(const std::filesystem::path& step, const SidecarEntry& entry, FileSystem& files = FileSystem::current());

/// Reads all files of a step. Throws one DamageError that lists all files that are missing, too short, too long or damaged.
void verify_step(const std::filesystem::path& step, FileSystem& files = FileSystem::current());

}  // namespace fsdp::ckpt
