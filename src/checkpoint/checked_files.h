#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/commit.h"
#include "checkpoint/files.h"
#include "checkpoint/scratch.h"

namespace fsdp::ckpt {

class CheckedFile;

/// The memory into which blocks of the files of a folder are read, to be checked. A block of which only some bytes were needed is kept for
/// a while, because records begin and end within blocks, and their ends are read first.
class BlockMemory {
 public:
  /// Memory of the size of a block, for bytes that are not needed after they have been summed.
  std::span<char> passing() { return passing_.bytes(); }
  /// The block, if it is still here; empty otherwise.
  std::span<char> find(const CheckedFile& file, std::size_t index);
  /// Memory for another block: that of the block whose last use was longest ago. keep() sets the block that it holds from then on.
  std::span<char> oldest();
  void keep(const CheckedFile& file, std::size_t index);

 private:
  struct Block {
    const CheckedFile* file = nullptr;
    std::size_t index = 0;
    std::uint64_t used = 0;
    Scratch scratch{kSummedBlock};
  };
  Block& oldest_block();

  // Three blocks are kept: the two in which a record begins and ends, and the one with the end of the record before.
  std::array<Block, 3> blocks_;
  Scratch passing_{kSummedBlock};
  std::uint64_t uses_ = 0;
};

/// A file that is read in parts, each of which is checked. It remembers which blocks (kSummedBlock) have been checked. One thread at a
/// time.
class CheckedFile {
 public:
  /// `listed`: the sidecar's entry, or null. Throws Error if the file is missing, or shorter or longer than listed. `listed` and
  /// `memory` must outlive it.
  CheckedFile(const std::filesystem::path& path, const ListedFile* listed, BlockMemory& memory, FileSystem& files);

  /// Whether the sidecar lists the file, so that its bytes can be compared with checksums.
  bool is_listed() const { return listed_ != nullptr; }
  /// Reads and checks the blocks that contain these bytes. Returns the CRC-32 of the bytes, so that a second reading can be compared with
  /// it. Throws Error if the bytes cannot be read, or are not those that were written.
  std::uint32_t check(std::int64_t offset, std::int64_t length);
  /// Does the same as check(), and also stores the bytes in `to`. If it throws, `to` may hold some of them.
  std::uint32_t read(std::int64_t offset, std::span<char> to);
  /// Reads bytes again that were checked before, and returns `sum` continued by them. They usually come from the system's page cache.
  /// Throws Error.
  std::uint32_t read_again(std::int64_t offset, std::span<char> to, std::uint32_t sum) const { return read_summed(file_, offset, to, sum); }
  /// A function that calls read(). It may be used as long as this object exists.
  ReadAt reader();

  [[noreturn]] void fail(const std::string& fault) const;
  const File& file() const { return file_; }

 private:
  /// Returns a block of a listed file. Reads and checks it, unless it is still in memory.
  std::span<const char> load(std::size_t block);
  /// Throws DamageError if a block's checksum is not the listed one.
  void compare(std::size_t block, std::uint32_t sum);
  /// `to`: where the bytes go, or null.
  std::uint32_t pass(std::int64_t offset, std::int64_t length, char* to);

  File file_;
  std::int64_t size_;
  const ListedFile* listed_;
  std::vector<bool> is_checked_;
  BlockMemory& memory_;
};

/// Returns the path of a file of a checkpoint, by its name.
using PathOf = std::function<std::filesystem::path(const std::string& name)>;

/// The files of a folder. Each is opened when it is first needed, and checked against the folder's sidecar if there is one.
class CheckedFiles {
 public:
  explicit CheckedFiles(const std::filesystem::path& folder, FileSystem& files = FileSystem::current());
  /// The files may lie in several folders.
  explicit CheckedFiles(PathOf path_of, FileSystem& files = FileSystem::current());
  CheckedFiles(const CheckedFiles&) = delete;
  CheckedFiles& operator=(const CheckedFiles&) = delete;

  /// Returns the file of this name. Throws Error if it cannot be opened, or if there is a sidecar that does not list it.
  CheckedFile& operator[](const std::string& name);
  /// Sidecar::saved; 0 if there is no sidecar.
  std::int64_t saved() const { return saved_; }
  /// Reads and checks a whole file of at most `most` bytes.
  std::string read_whole(const std::string& name, std::int64_t most);

 private:
  std::filesystem::path sidecar_folder() const { return path_of_(std::string(kSidecar)).parent_path(); }

  PathOf path_of_;
  FileSystem& files_;
  bool has_sidecar_;
  std::int64_t saved_ = 0;
  std::map<std::string, SidecarEntry> listed_;
  std::map<std::string, ListedFile> sums_;  // the sidecar's entries of the files that were opened
  std::map<std::string, CheckedFile> open_;
  BlockMemory memory_;
};

}  // namespace fsdp::ckpt
