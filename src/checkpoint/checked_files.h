#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/commit.h"
#include "checkpoint/files.h"
#include "checkpoint/scratch.h"

namespace fsdp::ckpt {

class CheckedFile;

/// Memory of the files of a folder for what is read to be checked. A block of which some bytes were needed stays for a while: records
/// begin and end within blocks, and their ends are read first.
class BlockMemory {
 public:
  /// Where bytes go that nobody needs again, a block of them.
  std::span<char> passing() { return passing_.bytes(); }
  /// The block, if it is still here; empty otherwise.
  std::span<char> find(const CheckedFile& file, std::size_t index);
  /// Memory for a block, which becomes the given one by keep(). That of the block which was asked for longest ago.
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

  // Those in which a record begins and ends, and one with the end of the record before.
  std::array<Block, 3> blocks_;
  Scratch passing_{kSummedBlock};
  std::uint64_t uses_ = 0;
};

/// A file that is read in parts, each of them checked. What is checked is remembered, block by block (kSummedBlock). One thread at a time.
class CheckedFile {
 public:
  /// `listed`: the sidecar's entry, or null. Throws Error if the file is missing, or shorter or longer than listed. `listed` and
  /// `memory` must outlive it.
  CheckedFile(const std::filesystem::path& path, const ListedFile* listed, BlockMemory& memory, FileSystem& files);

  /// Whether there is something to compare its bytes with.
  bool is_listed() const { return listed_ != nullptr; }
  /// Reads the blocks with these bytes, and returns the bytes' CRC-32: who reads them again can compare it. Throws Error if they cannot be
  /// read, or are not what was written.
  std::uint32_t check(std::int64_t offset, std::int64_t length);
  /// As check(), and keeps the bytes. If it throws, `to` has some of them.
  std::uint32_t read(std::int64_t offset, std::span<char> to);
  /// Reads what was checked again, and goes on with its checksum: the system has it in memory, or reads it once more. Throws Error.
  std::uint32_t read_again(std::int64_t offset, std::span<char> to, std::uint32_t sum) const { return read_summed(file_, offset, to, sum); }
  /// read(). Valid as long as this.
  ReadAt reader();

  [[noreturn]] void fail(const std::string& fault) const;
  const File& file() const { return file_; }

 private:
  /// Reads and checks a listed file's block, unless it is still in memory.
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

/// Files of a folder, opened when they are first needed, and checked by the folder's sidecar where there is one.
class CheckedFiles {
 public:
  explicit CheckedFiles(std::filesystem::path folder, FileSystem& files = FileSystem::current());
  CheckedFiles(const CheckedFiles&) = delete;
  CheckedFiles& operator=(const CheckedFiles&) = delete;

  /// Throws Error if it cannot be opened, or there is a sidecar that does not list it.
  CheckedFile& operator[](const std::string& name);
  /// All of a file, checked.
  std::string read_whole(const std::string& name, std::int64_t most);

 private:
  std::filesystem::path folder_;
  FileSystem& files_;
  bool has_sidecar_;
  std::map<std::string, SidecarEntry> listed_;
  std::map<std::string, ListedFile> sums_;  // of those that were opened
  std::map<std::string, CheckedFile> open_;
  BlockMemory memory_;
};

}  // namespace fsdp::ckpt
