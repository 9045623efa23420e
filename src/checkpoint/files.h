#pragma once

#include <sys/stat.h>
#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "fsdp/error.h"

namespace fsdp::ckpt {

/// The system refused a call. Whether what was looked for is there can be told from it only if is_missing().
class SystemError : public Error {
 public:
  SystemError(const std::string& message, int code) : Error(message), code_(code) {}
  /// errno as it was.
  int code() const { return code_; }
  /// There is no such file, rather than one that could not be looked at.
  bool is_missing() const;

 private:
  int code_;
};

/// The system calls below everything here, with their own conventions: -1 and errno. Tests replace some, to have full disks and broken
/// ones. Called from any thread.
class FileSystem {
 public:
  FileSystem() = default;
  FileSystem(const FileSystem&) = delete;
  FileSystem& operator=(const FileSystem&) = delete;
  virtual ~FileSystem() = default;

  /// The operating system's.
  static FileSystem& real();
  /// What is used where nothing else is asked for: the operating system's, unless a ReplacedFileSystem is there.
  static FileSystem& current();

  virtual int open(const char* path, int flags, mode_t mode);
  virtual ssize_t pwrite(int file, const void* data, std::size_t length, off_t offset);
  virtual ssize_t pread(int file, void* data, std::size_t length, off_t offset);
  /// Linux's sync_file_range(SYNC_FILE_RANGE_WRITE).
  virtual int start_writing(int file, off_t offset, off_t length);
  virtual int fsync(int file);
  virtual int close(int file);
  virtual int mkdir(const char* path, mode_t mode);
  /// rename, or renameat2 with `flags` RENAME_EXCHANGE.
  virtual int rename(const char* from, const char* to, unsigned flags);
  virtual int unlink(const char* path);
  virtual int rmdir(const char* path);
  virtual int stat(const char* path, struct stat* status);
  virtual int lstat(const char* path, struct stat* status);
  virtual int fstat(int file, struct stat* status);
  /// Adds the names in a folder, in any order, without "." and "..".
  virtual int list(const char* path, std::vector<std::string>& names);
};

/// While it lives, this process's saves and loads go through `files`: for tests of what is above the files. One at a time, and none while
/// a save or load is under way.
class ReplacedFileSystem {
 public:
  explicit ReplacedFileSystem(FileSystem& files);
  ~ReplacedFileSystem();
  ReplacedFileSystem(const ReplacedFileSystem&) = delete;
  ReplacedFileSystem& operator=(const ReplacedFileSystem&) = delete;
};

/// Where bytes are read from: fills `to` from `offset` of a file, or throws Error.
using ReadAt = std::function<void(std::int64_t offset, std::span<char> to)>;

/// An open file. All methods but close() may be called from several threads at once; all throw Error, which names the file and the reason.
/// Interrupted and short transfers are continued.
class File {
 public:
  /// An empty file to write and read; an existing one is emptied. Readable by all that the process's umask lets.
  static File create(const std::filesystem::path& path, FileSystem& files = FileSystem::current());
  /// A file to write and read as it is, e.g. one that another rank has created.
  static File open_to_write(const std::filesystem::path& path, FileSystem& files = FileSystem::current());
  static File open(const std::filesystem::path& path, FileSystem& files = FileSystem::current());
  File(File&& other) noexcept;
  File& operator=(File&&) = delete;
  /// Closes; an error goes unnoticed then. Who has written calls sync() and close().
  ~File();

  const std::filesystem::path& path() const { return path_; }
  /// Of a file that was opened, as it was then; of one that is written, now.
  std::int64_t size() const;
  void write_at(std::int64_t offset, std::span<const char> data);
  /// Throws if the file ends before `to` is full.
  void read_at(std::int64_t offset, std::span<char> to) const;
  ReadAt reader() const;
  /// Lets the system begin with what sync() waits for, so that a disk is busy while a file is still being made. A wish.
  void start_writing(std::int64_t offset, std::int64_t length);
  /// Returns when the bytes would survive a loss of power.
  void sync();
  void close();

 private:
  File(std::filesystem::path path, int flags, FileSystem& files);
  [[noreturn]] void fail(const std::string& doing) const;

  std::filesystem::path path_;
  FileSystem* files_;
  int file_ = -1;
};

/// The whole of a file of at most `most` bytes; a larger one is an Error.
std::string read_whole(const std::filesystem::path& path, std::int64_t most, FileSystem& files = FileSystem::current());

/// Creates a file with this content, and syncs it.
void write_whole(const std::filesystem::path& path, std::string_view content, FileSystem& files = FileSystem::current());

/// The parent must be there, the folder not.
void make_folder(const std::filesystem::path& path, FileSystem& files = FileSystem::current());

/// What was created, renamed and removed in the folder survives a loss of power after this.
void sync_folder(const std::filesystem::path& path, FileSystem& files = FileSystem::current());

/// Names in a folder, in order. Throws if it cannot be read, e.g. is not there.
std::vector<std::string> list_folder(const std::filesystem::path& path, FileSystem& files = FileSystem::current());

/// In a folder that a step is written into, and in the step: who wrote it (lease.h). What has it is this library's to remove.
inline constexpr std::string_view kOwnerFile = ".fsdp-owner";

/// A folder with all that is in it, the owner file last; or a file. Nothing there is no error. Links are removed, not followed. Where NFS
/// keeps what a process has open, under names `.nfs...`, these, the owner file and the folder stay, for the next time; no error either.
void remove_tree(const std::filesystem::path& path, FileSystem& files = FileSystem::current());
/// The same, as far as it goes: while another error is on its way.
void remove_quietly(const std::filesystem::path& path, FileSystem& files = FileSystem::current()) noexcept;

/// A file, a folder, or a link, wherever that leads. Throws if that cannot be told.
bool is_there(const std::filesystem::path& path, FileSystem& files = FileSystem::current());
/// A folder, or a link to one. Throws if that cannot be told.
bool is_folder(const std::filesystem::path& path, FileSystem& files = FileSystem::current());

/// FileSystem::rename(). Throws Error.
void rename_to(const std::filesystem::path& from, const std::filesystem::path& to, unsigned flags,
               FileSystem& files = FileSystem::current());

/// SystemError: "cannot <doing> <path>: <errno's text>", for errno as it is now.
[[noreturn]] void throw_errno(const std::string& doing, const std::filesystem::path& path);

}  // namespace fsdp::ckpt
