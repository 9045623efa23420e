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

/// Memory of this process that others of the same user may map: one file without a name (memfd) for each process, which goes with it. What
/// lies at which offset never moves, so whoever has mapped the file once finds every block.
///
/// A forked child does not share it: its copy is private from the fork on, and it opens a heap of its own where it needs one. Thread-safe.
class SharedHeap : public std::enable_shared_from_this<SharedHeap> {
 public:
  /// This process's heap, which is made unless it has one. Throws Error, which says what the system refuses.
  static std::shared_ptr<SharedHeap> open();
  /// The same, or null where nobody holds one.
  static std::shared_ptr<SharedHeap> opened();

  ~SharedHeap();
  SharedHeap(const SharedHeap&) = delete;
  SharedHeap& operator=(const SharedHeap&) = delete;

  /// A block, not initialised, which keeps the heap. Null where there is no room.
  c10::DataPtr allocate(std::int64_t bytes);
  /// Ends a block whose pages stay as long as anybody has mapped the file.
  static void leave_behind(c10::DataPtr block);
  /// The block is one of a heap of this process, or (in a forked child) of the parent's.
  static bool is_block(const c10::DataPtr& memory);
  /// Where `data` lies in the file; nothing where it lies elsewhere.
  std::optional<std::int64_t> offset_of(const void* data) const;

  /// False in a process that was forked from the owner: another thread of the owner may have held the locks of what belongs to the heap.
  bool is_own() const;
  /// Of the file, in this process.
  int fd() const { return fd_; }
  /// Of the file, bytes: all that blocks may ever take. It has pages only where blocks are.
  std::int64_t size() const { return size_; }
  /// The lowest page, zero at first, for whoever opened the heap. Other processes read it at the beginning of the file.
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
