#include "checkpoint/output_file.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <system_error>

#include "checkpoint/digits.h"
#include "checkpoint/step_names.h"

namespace fsdp::ckpt {
namespace {

namespace fs = std::filesystem;

bool is_below_proc(const fs::path& path) {
  struct statfs status {};
  return ::statfs(parent_of(path).c_str(), &status) == 0 && status.f_type == PROC_SUPER_MAGIC;
}

fs::path without_slash(const fs::path& path) { return path.has_filename() ? path : path.parent_path(); }

/// Opens the place to write it as it is. A descriptor of this process is not opened again, as that would begin at the file's first byte.
int open_in_place(const fs::path& place) {
  std::error_code none;
  const auto number = number_in<int>(place.filename().string());
  if (number && fs::equivalent(parent_of(place), "/proc/self/fd", none)) return ::fcntl(*number, F_DUPFD_CLOEXEC, 0);
  return ::open(place.c_str(), O_WRONLY | O_CLOEXEC);
}

/// Writes all of the text and closes the file. Returns whether that succeeded; otherwise errno is set.
bool write_and_close(int file, std::string_view text) {
  int error = file < 0 ? errno : 0;
  while (error == 0 && !text.empty()) {
    const ssize_t written = ::write(file, text.data(), text.size());
    if (written >= 0) {
      text.remove_prefix(static_cast<std::size_t>(written));
    } else if (errno != EINTR) {
      error = errno;
    }
  }
  if (file >= 0 && ::close(file) != 0 && error == 0 && errno != EINTR) error = errno;
  errno = error;
  return error == 0;
}

}  // namespace

fs::path follow_links(const fs::path& path, FileSystem& files) {
  constexpr int kMostLinks = 40;  // as in Linux
  fs::path place = without_slash(path);
  struct stat status {};
  for (int links = 0; files.lstat(place.c_str(), &status) == 0 && S_ISLNK(status.st_mode) && !is_below_proc(place); ++links) {
    if (links == kMostLinks) {
      errno = ELOOP;
      throw_errno("follow the links at", path);
    }
    place = without_slash(place.parent_path() / fs::read_symlink(place));
  }
  return place;
}

bool is_written_in_place(const fs::path& path) {
  struct stat status {};
  // What is still a link leads to an open file.
  return ::lstat(follow_links(path).c_str(), &status) == 0 && !S_ISREG(status.st_mode);
}

void write_output(const fs::path& path, std::string_view text) {
  const fs::path place = follow_links(path);
  if (is_written_in_place(place)) {
    if (!write_and_close(open_in_place(place), text)) throw_errno("write", path);
    return;
  }
  auto beside = place;
  beside += std::string(kTemporaryPrefix) + std::to_string(::getpid());
  if (write_and_close(::open(beside.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666), text) &&
      ::rename(beside.c_str(), place.c_str()) == 0) {
    return;
  }
  const int error = errno;
  ::unlink(beside.c_str());
  errno = error;
  throw_errno("write", path);
}

}  // namespace fsdp::ckpt
