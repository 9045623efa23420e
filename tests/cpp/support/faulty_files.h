#pragma once

#include <fcntl.h>
#include <sys/types.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "checkpoint/files.h"

namespace fsdp::testing {

/// The real file system, with faults.
class FaultyFiles : public ckpt::FileSystem {
 public:
  /// Every transfer moves at most so many bytes.
  std::size_t most_at_once = SIZE_MAX;
  /// Every other transfer, fsync and open is interrupted first.
  bool interrupts = false;
  /// Bytes that still fit the disk.
  std::atomic<std::int64_t> space = INT64_MAX;
  /// So many calls that take space (create, pwrite, mkdir, fsync) succeed; the disk is full for those that follow.
  std::atomic<std::int64_t> calls_with_space = INT64_MAX;
  /// So many preads succeed before pread_error strikes.
  std::atomic<std::int64_t> good_preads = 0;
  /// After so many preads, each returns one byte that changed.
  std::atomic<std::int64_t> true_preads = INT64_MAX;
  /// The errno with which these calls fail; 0 for none.
  int pwrite_error = 0;
  int pread_error = 0;
  int fsync_error = 0;
  int close_error = 0;
  int rename_error = 0;
  int unlink_error = 0;
  /// Looking at what has `unseen` in its path fails with this errno.
  int look_error = 0;
  std::string unseen;
  /// As NFS does with a file that a process has open: what has this in its path gets a name `.nfs...` when it is removed, and keeps that.
  std::string held_open;
  /// After a rename every fsync fails.
  bool fsync_fails_after_rename = false;
  /// As where renameat2 cannot exchange.
  bool can_exchange = true;
  std::chrono::milliseconds fsync_time{0};
  /// Called before every call that changes something, with its name and path (empty for those of an open file). May throw, which stands for
  /// the end of the process there.
  std::function<void(const std::string& call, const std::string& path)> before;

  int open(const char* path, int flags, mode_t mode) override {
    if (interrupted()) return -1;
    if ((flags & O_CREAT) != 0) announce("create", path);
    if ((flags & O_CREAT) != 0 && is_full()) return fail(ENOSPC);
    if (is_unseen(path)) return fail(look_error);
    return FileSystem::open(path, flags, mode);
  }
  ssize_t pwrite(int file, const void* data, std::size_t length, off_t offset) override {
    if (interrupted()) return -1;
    announce("pwrite");
    if (pwrite_error != 0) return fail(pwrite_error);
    if (is_full()) return fail(ENOSPC);
    length = std::min({length, most_at_once, static_cast<std::size_t>(std::max<std::int64_t>(space, 0))});
    if (length == 0) return fail(ENOSPC);
    space -= static_cast<std::int64_t>(length);
    return FileSystem::pwrite(file, data, length, offset);
  }
  ssize_t pread(int file, void* data, std::size_t length, off_t offset) override {
    if (interrupted()) return -1;
    if (pread_error != 0 && good_preads-- <= 0) return fail(pread_error);
    const ssize_t count = FileSystem::pread(file, data, std::min(length, most_at_once), offset);
    if (count > 0 && true_preads-- <= 0) static_cast<char*>(data)[count / 2] ^= 1;
    return count;
  }
  int fsync(int file) override {
    if (interrupted()) return -1;
    announce("fsync");
    std::this_thread::sleep_for(fsync_time);
    if (fsync_fails_after_rename && renamed_) return fail(EIO);
    if (is_full()) return fail(ENOSPC);
    return fsync_error != 0 ? fail(fsync_error) : FileSystem::fsync(file);
  }
  int close(int file) override {
    const int result = FileSystem::close(file);
    return close_error != 0 ? fail(close_error) : result;
  }
  int mkdir(const char* path, mode_t mode) override {
    announce("mkdir", path);
    if (is_full()) return fail(ENOSPC);
    return FileSystem::mkdir(path, mode);
  }
  int rename(const char* from, const char* to, unsigned flags) override {
    announce("rename", to);
    if (rename_error != 0) return fail(rename_error);
    if (flags != 0 && !can_exchange) return fail(EINVAL);
    renamed_ = true;
    return FileSystem::rename(from, to, flags);
  }
  int unlink(const char* path) override {
    announce("unlink", path);
    if (unlink_error != 0) return fail(unlink_error);
    if (!held_open.empty()) {
      const std::filesystem::path file = path;
      if (file.filename().string().starts_with(".nfs")) return fail(EBUSY);
      if (file.string().find(held_open) != std::string::npos) {
        return FileSystem::rename(path, (file.parent_path() / ".nfs0123").c_str(), 0);
      }
    }
    return FileSystem::unlink(path);
  }
  int stat(const char* path, struct stat* status) override { return is_unseen(path) ? fail(look_error) : FileSystem::stat(path, status); }
  int lstat(const char* path, struct stat* status) override { return is_unseen(path) ? fail(look_error) : FileSystem::lstat(path, status); }
  int list(const char* path, std::vector<std::string>& names) override {
    return is_unseen(path) ? fail(look_error) : FileSystem::list(path, names);
  }
  int rmdir(const char* path) override {
    announce("rmdir", path);
    return FileSystem::rmdir(path);
  }

 private:
  static int fail(int error) {
    errno = error;
    return -1;
  }
  bool is_unseen(const std::string& path) const { return look_error != 0 && path.find(unseen) != std::string::npos; }
  bool is_full() { return calls_with_space-- <= 0; }
  bool interrupted() {
    if (!interrupts || (calls_++ % 2) != 0) return false;
    errno = EINTR;
    return true;
  }
  void announce(const std::string& call, const std::string& path = "") const {
    if (before) before(call, path);
  }

  std::atomic<int> calls_ = 0;
  std::atomic<bool> renamed_ = false;
};

/// Damages a file: changes one bit of the byte at `offset`. Twice is as if nothing had been.
inline void flip_bit(const std::filesystem::path& path, std::int64_t offset, int bit) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(offset);
  const auto byte = static_cast<char>(file.get() ^ (1 << bit));
  file.seekp(offset);
  file.put(byte);
}

}  // namespace fsdp::testing
