#pragma once

#include <c10/core/Allocator.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "memory/shared_heap.h"

namespace fsdp::comm {

/// The data structure at the beginning of a process's shared heap. Only the process that owns the heap writes it.
struct HeapHead {
  std::array<std::uint64_t, 2> nonce;  ///< A random name that no other heap has.
  /// A counter that grows when this process has published data for its peers. Processes that wait for that sleep on it (a futex).
  std::atomic<std::uint32_t> news;
  /// A counter that grows when a thread of this process has waited for a while. The threads of peers that advance collectives sleep on it.
  std::atomic<std::uint32_t> requests;
};

/// The facts by which another process finds a process's heap.
struct HeapAddress {
  std::int64_t process = 0;
  std::int64_t fd = -1;
  std::int64_t size = 0;
  std::array<std::uint64_t, 2> nonce = {};
};

/// Another process's heap, mapped for reading. Only its owner writes there.
class PeerHeap {
 public:
  /// Maps the heap at this address. Returns null if the process is not visible from here (it is in another container). Throws Error, which
  /// names the call that the system refuses.
  static std::shared_ptr<const PeerHeap> find(const HeapAddress& address);
  ~PeerHeap();
  PeerHeap(const PeerHeap&) = delete;
  PeerHeap& operator=(const PeerHeap&) = delete;

  /// True if the process that owns the heap ended a while ago. Its connections should then have closed, but a process that it forked may
  /// keep them open. False if the system does not report it.
  bool has_lost_owner() const;

  const char* at(std::int64_t offset) const { return base_ + offset; }
  std::int64_t size() const { return size_; }
  const HeapHead& head() const { return *reinterpret_cast<const HeapHead*>(base_); }

 private:
  explicit PeerHeap(int owner) : owner_(owner) {}
  bool map(const HeapAddress& address);

  const char* base_ = nullptr;
  std::int64_t size_ = 0;
  const int owner_;                            // a descriptor of the owner's process (pidfd), or -1
  mutable std::atomic<std::int64_t> lost_{0};  // when the owner was first found to have ended, nanoseconds of the steady clock; 0: never
};

/// The memory that this process shares with others of its host: its own heap, the peers' heaps, and blocks of its heap into which a
/// collective copies what lies elsewhere. All shared rows of the process share one, which is released with the last of them. Thread-safe.
class HostMemory {
 public:
  /// Returns this process's object, which is made if there is none. Throws Error (see SharedHeap::open).
  static std::shared_ptr<HostMemory> open();

  /// Returns this process's object, or null if no row holds one.
  static std::shared_ptr<HostMemory> opened();

  ~HostMemory();
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  memory::SharedHeap& heap() { return *heap_; }
  HeapHead& head() { return *static_cast<HeapHead*>(heap_->first_page()); }
  HeapAddress address() const;

  /// Does the same as PeerHeap::find, but maps each heap only once.
  std::shared_ptr<const PeerHeap> peer(const HeapAddress& address);
  /// Returns the heaps that rows of this process use.
  std::vector<std::shared_ptr<const PeerHeap>> peers();

  /// A block of the heap for a collective. Throws c10::OutOfMemoryError.
  struct Block {
    c10::DataPtr memory;
    std::int64_t bytes = 0;
  };
  Block borrow(std::int64_t bytes);
  void give_back(Block block);

  /// Keeps the mailbox of a row that has gone. Peers that are behind this rank still read there that this rank has finished its part.
  void keep_for_late_peers(c10::DataPtr mailbox);

  /// Wakes peers that sleep on `news`, so that they look at this heap again.
  void wake_peers();
  /// Asks the peers' threads to advance their collectives, because this process waits for them.
  void ask_peers_to_advance();

 private:
  explicit HostMemory(std::shared_ptr<memory::SharedHeap> heap);

  const std::shared_ptr<memory::SharedHeap> heap_;
  std::mutex mutex_;
  std::map<std::array<std::uint64_t, 2>, std::weak_ptr<const PeerHeap>> peers_;
  std::multimap<std::int64_t, c10::DataPtr> blocks_;  // free blocks by their size in bytes
  std::deque<c10::DataPtr> kept_for_late_peers_;
};

/// Wakes all threads that sleep on the word, in this process and in processes that have mapped it.
void wake_sleepers(const std::atomic<std::uint32_t>& word);

/// Sleeps until one of the words has changed, or until `microseconds` have passed (a much shorter time if the system can't wait for several
/// words).
struct WatchedWord {
  const std::atomic<std::uint32_t>* word;
  std::uint32_t seen;
};
/// True if the system can wait for several words at once. Otherwise sleep_on() wakes often to look at them.
bool can_sleep_on_several();
void sleep_on(const std::vector<WatchedWord>& words, std::int64_t microseconds);

}  // namespace fsdp::comm
