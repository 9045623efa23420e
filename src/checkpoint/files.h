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

/// The system refused a call. If is_missing() is true, the file does not exist; otherwise it may exist.
class SystemError : public Error {
 public:
  SystemError(const std::string& message, int code) : Error(message), code_(code) {}
  /// errno as it was.
  int code() const { return code_; }
  /// True if there is no such file; false if the file could not be examined.
  bool is_missing() const;

 private:
  int code_;
};

/// The system calls that all code in this folder uses. They follow the system's conventions (-1 and errno). Tests replace some of them to
/// simulate full and broken disks. Any thread may call them.
class FileSystem {
 public:
  FileSystem() = default;
  FileSystem(const FileSystem&) = delete;
  FileSystem& operator=(const FileSystem&) = delete;
  virtual ~FileSystem() = default;

  /// The operating system's.
  static FileSystem& real();
  /// The default: the operating system's calls, unless a ReplacedFileSystem exists.
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

/// A guard. During its lifetime, this process's saves and loads go through `files`. Tests of higher layers use it. Only one may exist at a
/// time, and none may begin or end while a save or load is under way.
class ReplacedFileSystem {
 public:
  explicit ReplacedFileSystem(FileSystem& files);
  ~ReplacedFileSystem();
  ReplacedFileSystem(const ReplacedFileSystem&) = delete;
  ReplacedFileSystem& operator=(const ReplacedFileSystem&) = delete;
};

/// A source of bytes: a function that fills `to` with the bytes of a file from `offset` on, or throws Error.
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
  /// Closes the file. Errors are ignored here, so code that has written calls sync() and close() before.
  ~File();

  const std::filesystem::path& path() const { return path_; }
  /// The size in bytes: for a file that is being written, the current one; for others, the size when the file was opened.
  std::int64_t size() const;
  void write_at(std::int64_t offset, std::span<const char> data);
  /// Reads as many bytes as `to` has. Throws if the file ends before.
  void read_at(std::int64_t offset, std::span<char> to) const;
  ReadAt reader() const;
  /// Asks the system to start writing this range to the disk, for which sync() waits later. The disk then works while the rest of the file
  /// is being made. A failure has no effect.
  void start_writing(std::int64_t offset, std::int64_t length);
  /// Returns once the bytes would survive a loss of power.
  void sync();
  void close();

 private:
  File(std::filesystem::path path, int flags, FileSystem& files);
  [[noreturn]] void fail(const std::string& doing) const;

  std::filesystem::path path_;
  FileSystem* files_;
  int file_ = -1;
};

/// Reads a whole file of at most `most` bytes. Throws Error for a larger one.
std::string read_whole(const std::filesystem::path& path, std::int64_t most, FileSystem& files = FileSystem::current());

/// Creates a file with this content, and syncs it.
void write_whole(const std::filesystem::path& path, std::string_view content, FileSystem& files = FileSystem::current());

/// Makes a folder. Its parent must exist, and the folder must not.
void make_folder(const std::filesystem::path& path, FileSystem& files = FileSystem::current());

/// After this call, files that were created, renamed and removed in the folder stay so after a loss of power.
void sync_folder(const std::filesystem::path& path, FileSystem& files = FileSystem::current());

/// Returns the sorted names in a folder. Throws if the folder cannot be read, for example because it does not exist.
std::vector<std::string> list_folder(const std::filesystem::path& path, FileSystem& files = FileSystem::current());

/// The file that names the process that writes, or has written, a step's folder (lease.h). This library may remove folders that contain it.
inline constexpr std::string_view kOwnerFile = ".fsdp-owner";

/// Removes a file, or a folder with all that it contains, the owner file last. It is no error if nothing exists at the path. Links are
/// removed, not followed. If NFS keeps files that a process has open, under names `.nfs...`, then these, the owner file and the folder
/// stay, to be removed another time. This is no error either.
void remove_tree(const std::filesystem::path& path, FileSystem& files = FileSystem::current());
/// Removes it and ignores errors. For use while another error is being reported.
void remove_quietly(const std::filesystem::path& path, FileSystem& files = FileSystem::current()) noexcept;

/// True if a file, a folder or a link (whatever its target) exists at the path. Throws if the system does not allow to find out.
bool is_there(const std::filesystem::path& path, FileSystem& files = FileSystem::current());
/// True if the path is a folder or a link to one. Throws if the system does not allow to find out.
bool is_folder(const std::filesystem::path& path, FileSystem& files = FileSystem::current());

/// Calls FileSystem::rename(). Throws Error.
void rename_to(const std::filesystem::path& from, const std::filesystem::path& to, unsigned flags,
               FileSystem& files = FileSystem::current());

/// Throws SystemError with the message "cannot <doing> <path>: <text of errno>", for the present value of errno.
[[noreturn]] void throw_errno(const std::string& doing, const std::filesystem::path& path);

}  // namespace fsdp::ckpt
