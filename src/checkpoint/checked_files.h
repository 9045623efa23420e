#pragma once

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

/// The block that was read last, of all files of a folder: what is read of it again comes from here.
struct LastBlock {
  const CheckedFile* file = nullptr;
  std::size_t index = 0;
  Scratch scratch{static_cast<std::size_t>(kSummedBlock)};
};

/// A file that is read in parts, each checked before. What is checked is remembered, block by block (kSummedBlock). One thread at a time.
class CheckedFile {
 public:
  /// `listed`: the sidecar's entry, or null. Throws Error if the file is missing, or shorter or longer than listed. `listed` and `last`
  /// must outlive it.
  CheckedFile(const std::filesystem::path& path, const ListedFile* listed, LastBlock& last, FileSystem& files);

  /// Whether there is something to compare its bytes with.
  bool is_listed() const { return listed_ != nullptr; }
  /// Reads the blocks with these bytes, and returns the bytes' CRC-32: who reads them again can compare it. Throws Error if they cannot be
  /// read, or are not what was written.
  std::uint32_t check(std::int64_t offset, std::int64_t length);
  /// Reads without checking: the system has what was checked in memory, or reads it once more.
  void read_at(std::int64_t offset, std::span<char> to) const { file_.read_at(offset, to); }
  /// Checks and reads. Valid as long as this.
  ReadAt reader();
  /// Lets the system begin to read these bytes. A wish.
  void start_reading(std::int64_t offset, std::int64_t length) const { file_.start_reading(offset, length); }

  [[noreturn]] void fail(const std::string& fault) const;
  const File& file() const { return file_; }

 private:
  /// Reads and checks a listed file's block; it lies in `last_` then.
  std::span<const char> load(std::size_t block);

  File file_;
  std::int64_t size_;
  const ListedFile* listed_;
  std::vector<bool> is_checked_;
  LastBlock& last_;
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
  LastBlock last_;
};

}  // namespace fsdp::ckpt
