#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/commit.h"
#include "checkpoint/files.h"

namespace fsdp::ckpt {

/// A file that is read in parts, each checked before. What is checked is remembered, block by block (kSummedBlock). One thread at a time.
class CheckedFile {
 public:
  /// `listed`: the sidecar's entry, or null. Throws Error if the file is missing, or shorter or longer than listed. `listed` and `scratch`
  /// must outlive it.
  CheckedFile(const std::filesystem::path& path, const ListedFile* listed, std::span<char> scratch, FileSystem& files);

  /// Reads the blocks with these bytes, once. Throws Error if one cannot be read, or is not what was written.
  void check(std::int64_t offset, std::int64_t length);
  /// Reads what was checked. It is not checked again: the system has it in memory, or reads it once more.
  void read_at(std::int64_t offset, std::span<char> to) const { file_.read_at(offset, to); }
  /// Checks and reads. Valid as long as this.
  ReadAt reader();
  /// Lets the system begin to read these bytes. A wish.
  void start_reading(std::int64_t offset, std::int64_t length) const { file_.start_reading(offset, length); }

 private:
  [[noreturn]] void fail(const std::string& fault) const;

  File file_;
  std::int64_t size_;
  const ListedFile* listed_;
  std::vector<bool> is_checked_;
  std::span<char> scratch_;
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
  std::map<std::string, ListedFile> listed_;
  std::map<std::string, CheckedFile> open_;
  std::vector<char> scratch_;
};

}  // namespace fsdp::ckpt
