#include "checkpoint/files.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <system_error>
#include <utility>

#include "base/process.h"
#include "fsdp/error.h"

namespace fsdp::ckpt {
namespace {

constexpr mode_t kFileMode = 0666;
constexpr mode_t kFolderMode = 0777;

/// Some systems refuse transfers of 2 GiB and more at once.
constexpr std::size_t kMostAtOnce = std::size_t{1} << 30;

/// The prefix of the name that an NFS client gives to a removed file while a process has it open.
constexpr std::string_view kKeptByNfs = ".nfs";

/// The replacement; null for the operating system's calls. It is atomic, because threads of asynchronous saves read it.
std::atomic<FileSystem*> replacement = nullptr;

/// Repeats a call that a signal interrupted.
template <typename Call>
auto uninterrupted(Call call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

}  // namespace

FileSystem& FileSystem::real() {
  static FileSystem instance;
  return instance;
}

FileSystem& FileSystem::current() {
  FileSystem* files = replacement;
  return files != nullptr ? *files : real();
}

ReplacedFileSystem::ReplacedFileSystem(FileSystem& files) { replacement = &files; }
ReplacedFileSystem::~ReplacedFileSystem() { replacement = nullptr; }

int FileSystem::open(const char* path, int flags, mode_t mode) {
  prepare_process();
  return ::open(path, flags, mode);
}
ssize_t FileSystem::pwrite(int file, const void* data, std::size_t length, off_t offset) { return ::pwrite(file, data, length, offset); }
ssize_t FileSystem::pread(int file, void* data, std::size_t length, off_t offset) { return ::pread(file, data, length, offset); }
int FileSystem::start_writing(int file, off_t offset, off_t length) {
  return ::sync_file_range(file, offset, length, SYNC_FILE_RANGE_WRITE);
}
int FileSystem::fsync(int file) { return ::fsync(file); }
int FileSystem::close(int file) { return ::close(file); }
int FileSystem::mkdir(const char* path, mode_t mode) { return ::mkdir(path, mode); }
// This does not use glibc's renameat2(), which old versions lack.
int FileSystem::rename(const char* from, const char* to, unsigned flags) {
  if (flags == 0) return ::rename(from, to);
  return static_cast<int>(::syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, flags));
}
int FileSystem::unlink(const char* path) { return ::unlink(path); }
int FileSystem::rmdir(const char* path) { return ::rmdir(path); }
int FileSystem::stat(const char* path, struct stat* status) { return ::stat(path, status); }
int FileSystem::lstat(const char* path, struct stat* status) { return ::lstat(path, status); }
int FileSystem::fstat(int file, struct stat* status) { return ::fstat(file, status); }
int FileSystem::list(const char* path, std::vector<std::string>& names) {
  DIR* folder = ::opendir(path);
  if (folder == nullptr) return -1;
  errno = 0;
  while (const dirent* entry = ::readdir(folder)) {
    const std::string_view name = entry->d_name;
    if (name != "." && name != "..") names.emplace_back(name);
    errno = 0;
  }
  const int error = errno;
  ::closedir(folder);
  errno = error;
  return error == 0 ? 0 : -1;
}

bool SystemError::is_missing() const { return code_ == ENOENT || code_ == ENOTDIR; }

void throw_errno(const std::string& doing, const std::filesystem::path& path) {
  const int code = errno;
  throw SystemError("cannot " + doing + " " + path.string() + ": " + std::generic_category().message(code), code);
}

namespace {

bool keeps_open_files(const std::filesystem::path& folder, FileSystem& files) {
  std::vector<std::string> names;
  files.list(folder.c_str(), names);  // a folder that no longer exists has no names
  return std::any_of(names.begin(), names.end(), [](const std::string& name) { return name.starts_with(kKeptByNfs); });
}

}  // namespace

File::File(std::filesystem::path path, int flags, FileSystem& files)
    : path_(std::move(path)),
      files_(&files),
      file_(uninterrupted([&] { return files_->open(path_.c_str(), flags | O_CLOEXEC, kFileMode); })) {
  if (file_ < 0) fail((flags & O_CREAT) != 0 ? "create" : "open");
}

File File::create(const std::filesystem::path& path, FileSystem& files) { return {path, O_RDWR | O_CREAT | O_TRUNC, files}; }
File File::open_to_write(const std::filesystem::path& path, FileSystem& files) { return {path, O_RDWR, files}; }
File File::open(const std::filesystem::path& path, FileSystem& files) { return {path, O_RDONLY, files}; }

File::File(File&& other) noexcept : path_(std::move(other.path_)), files_(other.files_), file_(std::exchange(other.file_, -1)) {}

File::~File() {
  if (file_ >= 0) files_->close(file_);
}

void File::fail(const std::string& doing) const { throw_errno(doing, path_); }

std::int64_t File::size() const {
  struct stat status {};
  if (files_->fstat(file_, &status) != 0) fail("look at");
  return status.st_size;
}

void File::write_at(std::int64_t offset, std::span<const char> data) {
  while (!data.empty()) {
    const std::size_t length = std::min(data.size(), kMostAtOnce);
    const ssize_t written = uninterrupted([&] { return files_->pwrite(file_, data.data(), length, offset); });
    if (written < 0) fail("write");
    if (written == 0) {
      errno = ENOSPC;  // what a write of nothing means for a file
      fail("write");
    }
    offset += written;
    data = data.subspan(static_cast<std::size_t>(written));
  }
}

void File::read_at(std::int64_t offset, std::span<char> to) const {
  while (!to.empty()) {
    const std::size_t length = std::min(to.size(), kMostAtOnce);
    const ssize_t count = uninterrupted([&] { return files_->pread(file_, to.data(), length, offset); });
    if (count < 0) fail("read");
    if (count == 0) {
      throw Error(path_.string() + " ends at byte " + std::to_string(offset) + ", but " + std::to_string(to.size()) +
                  " more were to be read there: it was cut off");
    }
    offset += count;
    to = to.subspan(static_cast<std::size_t>(count));
  }
}

ReadAt File::reader() const {
  return [this](std::int64_t offset, std::span<char> to) { read_at(offset, to); };
}

void File::start_writing(std::int64_t offset, std::int64_t length) { files_->start_writing(file_, offset, length); }

void File::sync() {
  if (uninterrupted([&] { return files_->fsync(file_); }) != 0) fail("sync");
}

void File::close() {
  // Not repeated: on Linux the descriptor is gone even if the call was interrupted.
  if (files_->close(std::exchange(file_, -1)) != 0 && errno != EINTR) fail("close");
}

std::string read_whole(const std::filesystem::path& path, std::int64_t most, FileSystem& files) {
  const File file = File::open(path, files);
  const std::int64_t size = file.size();
  if (size > most) {
    throw Error(path.string() + " has " + std::to_string(size) + " bytes; more than " + std::to_string(most) + " cannot be right");
  }
  std::string content(static_cast<std::size_t>(size), '\0');
  file.read_at(0, content);
  return content;
}

void write_whole(const std::filesystem::path& path, std::string_view content, FileSystem& files) {
  File file = File::create(path, files);
  file.write_at(0, content);
  file.sync();
  file.close();
}

void make_folder(const std::filesystem::path& path, FileSystem& files) {
  if (files.mkdir(path.c_str(), kFolderMode) != 0) throw_errno("create the folder", path);
}

void sync_folder(const std::filesystem::path& path, FileSystem& files) {
  const int folder = uninterrupted([&] { return files.open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0); });
  if (folder < 0) throw_errno("open the folder", path);
  const int result = uninterrupted([&] { return files.fsync(folder); });
  const int error = errno;
  files.close(folder);
  // Some network filesystems cannot sync folders, because they write them at once.
  if (result != 0 && error != EINVAL) {
    errno = error;
    throw_errno("sync the folder", path);
  }
}

std::vector<std::string> list_folder(const std::filesystem::path& path, FileSystem& files) {
  std::vector<std::string> names;
  if (files.list(path.c_str(), names) != 0) throw_errno("list", path);
  std::sort(names.begin(), names.end());
  return names;
}

bool is_there(const std::filesystem::path& path, FileSystem& files) {
  struct stat status {};
  if (files.lstat(path.c_str(), &status) == 0) return true;
  if (errno != ENOENT && errno != ENOTDIR) throw_errno("look at", path);
  return false;
}

bool is_folder(const std::filesystem::path& path, FileSystem& files) {
  struct stat status {};
  if (files.stat(path.c_str(), &status) == 0) return S_ISDIR(status.st_mode);
  if (errno != ENOENT && errno != ENOTDIR) throw_errno("look at", path);
  return false;
}

void rename_to(const std::filesystem::path& from, const std::filesystem::path& to, unsigned flags, FileSystem& files) {
  if (files.rename(from.c_str(), to.c_str(), flags) != 0) throw_errno("rename " + from.string() + " to", to);
}

void remove_tree(const std::filesystem::path& path, FileSystem& files) {
  struct stat status {};
  if (files.lstat(path.c_str(), &status) != 0) {
    if (errno == ENOENT) return;
    throw_errno("look at", path);
  }
  if (!S_ISDIR(status.st_mode)) {
    const bool is_kept = path.filename().string().starts_with(kKeptByNfs);
    if (files.unlink(path.c_str()) != 0 && errno != ENOENT && !(is_kept && errno == EBUSY)) throw_errno("remove", path);
    return;
  }
  std::vector<std::string> names;
  if (files.list(path.c_str(), names) != 0) {
    if (errno == ENOENT) return;  // Another process has removed it just now.
    throw_errno("list", path);
  }
  std::sort(names.begin(), names.end());
  const auto owner = std::find(names.begin(), names.end(), kOwnerFile);
  const bool has_owner = owner != names.end();
  if (has_owner) names.erase(owner);
  for (const std::string& name : names) remove_tree(path / name, files);
  if (keeps_open_files(path, files)) return;
  if (has_owner) remove_tree(path / kOwnerFile, files);
  if (files.rmdir(path.c_str()) == 0 || errno == ENOENT) return;
  const int error = errno;
  if (keeps_open_files(path, files)) return;
  errno = error;
  throw_errno("remove the folder", path);
}

void remove_quietly(const std::filesystem::path& path, FileSystem& files) noexcept {
  try {
    remove_tree(path, files);
  } catch (const std::exception&) {
    // The rest of the folder has a temporary name.
  }
}

}  // namespace fsdp::ckpt
