#pragma once

#include <fcntl.h>
#include <linux/fs.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/files.h"

namespace fsdp::testing {

/// The real file system, which also keeps a model of what the disk has: of a file's bytes and of a folder's names, what they are and what
/// they were at the last fsync of that file or folder. So it can be told what a loss of power would leave at any moment, at worst. It
/// begins with an empty folder. Calls from several threads happen one after the other.
class PowerLossFiles : public ckpt::FileSystem {
 public:
  /// What the disk has written of its own accord when power goes. Bytes of files are never among it: that is what makes a file with a name
  /// and nothing in it.
  enum class Written {
    kSyncedOnly,
    kAllNames,
    kNamesOfSteps,     ///< Steps that were renamed have their new names, but what is in them does not.
    kNamesWithinSteps  ///< The reverse.
  };
  static constexpr Written kAll[] = {Written::kSyncedOnly, Written::kAllNames, Written::kNamesOfSteps, Written::kNamesWithinSteps};

  /// Steps will be in folders of `top`.
  explicit PowerLossFiles(std::filesystem::path top) : top_(std::move(top)) {}

  /// Called after every call that changes what a loss of power would leave.
  std::function<void()> after_change;
  /// The fsync with this number (from 0) does nothing, but says that all is well. -1: none.
  int skipped_fsync = -1;
  int fsyncs() const { return static_cast<int>(synced_.size()); }
  /// The next fsync after this one was of the same folder, which makes this one redundant if nobody was told of anything in between.
  bool is_repeated(int fsync) const {
    const auto next = static_cast<std::size_t>(fsync) + 1;
    return next < synced_.size() && synced_[next] == synced_[next - 1];
  }
  /// As where renameat2 cannot exchange.
  bool can_exchange = true;

  /// Makes `to` what would be left. Within after_change, or when nothing is under way.
  void leave(Written written, const std::filesystem::path& to) const { copy(*root_, written, 0, to); }

  int open(const char* path, int flags, mode_t mode) override {
    const std::lock_guard lock(mutex_);
    const int file = FileSystem::open(path, flags, mode);
    if (file < 0) return file;
    const auto place = find(path);
    if (place.folder == nullptr) return file;
    auto& node = place.folder->names[place.name];
    const bool is_new = node == nullptr;
    if (is_new) node = std::make_shared<Node>();
    if ((flags & O_TRUNC) != 0) node->bytes.clear();
    open_[file] = node;
    if (is_new) changed();
    return file;
  }
  ssize_t pwrite(int file, const void* data, std::size_t length, off_t offset) override {
    const std::lock_guard lock(mutex_);
    const ssize_t written = FileSystem::pwrite(file, data, length, offset);
    if (written <= 0 || !open_.contains(file)) return written;
    auto& bytes = open_[file]->bytes;
    bytes.resize(std::max(bytes.size(), static_cast<std::size_t>(offset + written)));
    std::copy_n(static_cast<const char*>(data), written, bytes.begin() + offset);
    return written;
  }
  int fsync(int file) override {
    const std::lock_guard lock(mutex_);
    if (!open_.contains(file)) return FileSystem::fsync(file);
    Node& node = *open_[file];
    synced_.push_back(open_[file]);
    if (fsyncs() - 1 == skipped_fsync) return 0;
    node.synced_bytes = node.bytes;
    node.synced_names = node.names;
    changed();
    return 0;
  }
  int close(int file) override {
    const std::lock_guard lock(mutex_);
    open_.erase(file);
    return FileSystem::close(file);
  }
  int mkdir(const char* path, mode_t mode) override {
    const std::lock_guard lock(mutex_);
    const int result = FileSystem::mkdir(path, mode);
    if (result != 0) return result;
    const auto place = find(path);
    place.folder->names[place.name] = std::make_shared<Node>(Node{.is_folder = true});
    changed();
    return 0;
  }
  int rename(const char* from, const char* to, unsigned flags) override {
    const std::lock_guard lock(mutex_);
    if (flags != 0 && !can_exchange) {
      errno = EINVAL;
      return -1;
    }
    const int result = FileSystem::rename(from, to, flags);
    if (result != 0) return result;
    const auto source = find(from);
    const auto target = find(to);
    auto moved = std::exchange(source.folder->names[source.name], nullptr);
    source.folder->names[source.name] = std::exchange(target.folder->names[target.name], std::move(moved));
    if ((flags & RENAME_EXCHANGE) == 0) source.folder->names.erase(source.name);
    changed();
    return 0;
  }
  int unlink(const char* path) override { return removed(path, FileSystem::unlink(path)); }
  int rmdir(const char* path) override { return removed(path, FileSystem::rmdir(path)); }

 private:
  struct Node {
    bool is_folder = false;
    std::string bytes = {};
    std::string synced_bytes = {};
    std::map<std::string, std::shared_ptr<Node>> names = {};
    std::map<std::string, std::shared_ptr<Node>> synced_names = {};
  };
  struct Place {
    Node* folder = nullptr;  ///< Null for what is elsewhere.
    std::string name;
  };

  Place find(const std::filesystem::path& path) {
    const auto relative = path.lexically_relative(top_);
    if (relative.empty() || *relative.begin() == "..") return {};
    if (relative == ".") return {&above_, "top"};
    Node* folder = root_.get();
    for (const auto& part : relative.parent_path()) folder = folder->names.at(part).get();
    return {folder, relative.filename()};
  }
  int removed(const char* path, int result) {
    const std::lock_guard lock(mutex_);
    if (result != 0) return result;
    const auto place = find(path);
    place.folder->names.erase(place.name);
    changed();
    return 0;
  }
  void changed() const {
    if (after_change) after_change();
  }

  static void copy(const Node& folder, Written written, int depth, const std::filesystem::path& to) {
    std::filesystem::create_directories(to);
    constexpr int kOfSteps = 2;
    const bool all = written == Written::kAllNames || written == (depth < kOfSteps ? Written::kNamesOfSteps : Written::kNamesWithinSteps);
    for (const auto& [name, node] : all ? folder.names : folder.synced_names) {
      if (node->is_folder) {
        copy(*node, written, depth + 1, to / name);
      } else {
        std::ofstream(to / name, std::ios::binary) << node->synced_bytes;
      }
    }
  }

  const std::filesystem::path top_;
  std::shared_ptr<Node> root_ = std::make_shared<Node>(Node{.is_folder = true});
  Node above_{.is_folder = true, .names = {{"top", root_}}};
  std::map<int, std::shared_ptr<Node>> open_;
  std::vector<std::shared_ptr<Node>> synced_;
  std::recursive_mutex mutex_;
};

}  // namespace fsdp::testing
