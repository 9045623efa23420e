#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <sys/types.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

namespace fsdp::memory {

/// Memory of this process that other processes of the same user may map. It is one file without a name (memfd) for each process, which the
/// system removes with the process. Blocks never move within the file, so a process that has mapped the file once finds every block.
///
/// A forked child does not share the heap: its copy is private from the fork on, and it opens a heap of its own if it needs one.
/// Thread-safe.
class SharedHeap : public std::enable_shared_from_this<SharedHeap> {
 public:
  /// Returns this process's heap, which is made if there is none. Throws Error, which names the call that the system refuses.
  static std::shared_ptr<SharedHeap> open();
  /// Returns this process's heap, or null if there is none.
  static std::shared_ptr<SharedHeap> opened();

  ~SharedHeap();
  SharedHeap(const SharedHeap&) = delete;
  SharedHeap& operator=(const SharedHeap&) = delete;

  /// Returns a block, not initialised, which keeps the heap alive. Null if there is no room.
  c10::DataPtr allocate(std::int64_t bytes);
  /// Gives up a block without freeing its pages, which stay as long as some process has mapped the file.
  static void leave_behind(c10::DataPtr block);
  /// True if the memory is a block of a heap of this process or, in a forked child, of its parent.
  static bool is_block(const c10::DataPtr& memory);
  /// Returns the offset of `data` in the file; nothing if it does not lie there.
  std::optional<std::int64_t> offset_of(const void* data) const;

  /// False in a process that was forked from the heap's process. The heap must not be used there, because another thread may have held its
  /// locks during the fork.
  bool is_own() const;
  /// The descriptor of the file in this process.
  int fd() const { return fd_; }
  /// The size of the file in bytes, which limits the total size of blocks. Only blocks have pages of memory.
  std::int64_t size() const { return size_; }
  /// The first page of the file, which is zero at first. It is for the code that opened the heap; other processes read it at the beginning
  /// of the file.
  void* first_page() const { return base_; }

 private:
  SharedHeap(int fd, void* base, std::int64_t size);
  static void after_fork();
  static void free_block(void* context);
  void give_back(std::int64_t offset, std::int64_t bytes);
  void become_private();

  const pid_t process_;
  const int fd_;
  char* const base_;
  const std::int64_t size_;
  std::mutex mutex_;
  std::map<std::int64_t, std::int64_t> free_;  // offset and bytes; no two of them touch
};

}  // namespace fsdp::memory
