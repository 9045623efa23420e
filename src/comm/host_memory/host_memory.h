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

/// The beginning of a process's shared heap. Only its owner writes it.
struct HeapHead {
  std::array<std::uint64_t, 2> nonce;  ///< No other heap's.
  /// Grows when there is something new for others in this heap. Who waits for that sleeps on it (a futex).
  std::atomic<std::uint32_t> news;
  /// Grows when a thread of this process has waited for a while. A peer's thread that advances collectives sleeps on it.
  std::atomic<std::uint32_t> requests;
};

/// How to find a process's heap.
struct HeapAddress {
  std::int64_t process = 0;
  std::int64_t fd = -1;
  std::int64_t size = 0;
  std::array<std::uint64_t, 2> nonce = {};
};

/// Another process's heap, mapped for reading. What lies there is only what its owner wrote.
class PeerHeap {
 public:
  /// Null where the process is not in sight (it is in another container). Throws Error, which says what the system refuses.
  static std::shared_ptr<const PeerHeap> find(const HeapAddress& address);
  ~PeerHeap();
  PeerHeap(const PeerHeap&) = delete;
  PeerHeap& operator=(const PeerHeap&) = delete;

  /// Its owner has ended a while ago: the connections to it should have closed, but a process that it forked may keep them open. False
  /// where the system can't tell.
  bool has_lost_owner() const;

  const char* at(std::int64_t offset) const { return base_ + offset; }
  std::int64_t size() const { return size_; }
  const HeapHead& head() const { return *reinterpret_cast<const HeapHead*>(base_); }

 private:
  explicit PeerHeap(int owner) : owner_(owner) {}
  bool map(const HeapAddress& address);

  const char* base_ = nullptr;
  std::int64_t size_ = 0;
  const int owner_;                            // its process as a descriptor (pidfd), or -1
  mutable std::atomic<std::int64_t> lost_{0};  // when that was found to have ended first, nanoseconds of the steady clock
};

/// The memory that this process shares with others of its host: its own heap, the peers' heaps, and blocks of its heap into which a
/// collective copies what lies elsewhere. All shared rows of the process have one, which goes with the last of them. Thread-safe.
class HostMemory {
 public:
  /// This process's, which is made unless there is one. Throws Error (see SharedHeap::open).
  static std::shared_ptr<HostMemory> open();

  /// The same, or null where no row holds one.
  static std::shared_ptr<HostMemory> opened();

  ~HostMemory();
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  memory::SharedHeap& heap() { return *heap_; }
  HeapHead& head() { return *static_cast<HeapHead*>(heap_->first_page()); }
  HeapAddress address() const;

  /// As PeerHeap::find, but maps each only once.
  std::shared_ptr<const PeerHeap> peer(const HeapAddress& address);
  /// All that rows of this process use.
  std::vector<std::shared_ptr<const PeerHeap>> peers();

  /// A block of the heap for a collective. Throws c10::OutOfMemoryError.
  struct Block {
    c10::DataPtr memory;
    std::int64_t bytes = 0;
  };
  Block borrow(std::int64_t bytes);
  void give_back(Block block);

  /// Keeps the mailbox of a row that has gone. Peers that are later than this rank still read in it that this rank was done.
  void keep_for_late_peers(c10::DataPtr mailbox);

  /// Peers that sleep on `news` look at this heap again.
  void wake_peers();
  /// This process waits: the peers' threads advance their collectives.
  void ask_peers_to_advance();

 private:
  explicit HostMemory(std::shared_ptr<memory::SharedHeap> heap);

  const std::shared_ptr<memory::SharedHeap> heap_;
  std::mutex mutex_;
  std::map<std::array<std::uint64_t, 2>, std::weak_ptr<const PeerHeap>> peers_;
  std::multimap<std::int64_t, c10::DataPtr> blocks_;  // by bytes
  std::deque<c10::DataPtr> kept_for_late_peers_;
};

/// Whoever sleeps on the word, in this process or in those that have mapped it, looks again.
void wake_sleepers(const std::atomic<std::uint32_t>& word);

/// Sleeps until one of the words is no longer what it was, or for so many microseconds at most (much less where the system can't wait for
/// several words).
struct WatchedWord {
  const std::atomic<std::uint32_t>* word;
  std::uint32_t seen;
};
/// The system can wait for several words at once: else sleep_on() looks often.
bool can_sleep_on_several();
void sleep_on(const std::vector<WatchedWord>& words, std::int64_t microseconds);

}  // namespace fsdp::comm
