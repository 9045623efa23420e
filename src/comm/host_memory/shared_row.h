#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "comm/call.h"
#include "comm/host_memory/host_memory.h"

namespace fsdp::comm {

/// The ranks of a row that read each other's memory, all or those of one host: who is at which collective, and where its buffers lie. They
/// are numbered from 0 here; `first()` is the row's number of their first.
///
/// [Note: Memory instead of messages]
/// Each rank has a mailbox in its heap, which it alone writes. There it says of each of the row's collectives in turn what it does (the
/// Call), and of a gather or a reduction also at which offsets of its heap its buffers lie. The others compare that with their own call,
/// and read the buffers where they are. Who has read all that he needs says so in his own mailbox. When all peers have said it, a rank's
/// buffers are its own again. A rank that gives up revokes its mailbox before it uses its buffers for anything else. Who has read from them
/// meanwhile sees that, and does not trust what he has read.
class SharedRow {
 public:
  /// Tries which ranks of a row can read each other's memory. The result has all of them, or the neighbours of this rank where the row
  /// consists of hosts with equal numbers of ranks, one host's ranks after the other's. Otherwise null, on all ranks alike. Silent where
  /// ranks are on different hosts or in different containers; where the system refuses something, a line on stderr says what, once in a
  /// process. Collective over `gloo`. Throws std::runtime_error if a message can't be sent or received.
  static std::shared_ptr<SharedRow> connect(int rank, int size, c10d::Backend& gloo, bool wanted, std::chrono::milliseconds timeout);
  ~SharedRow();
  SharedRow(const SharedRow&) = delete;
  SharedRow& operator=(const SharedRow&) = delete;

  /// There is room for one more call: peers are done with the one whose place it takes. Compares calls on the way.
  bool has_room();
  /// Says what this rank does next.
  void publish(const Call& call);
  /// This rank's newest call has parts: it is done with that call when it says so.
  void announce_parts();
  /// Tells peers where the parts of that call lie, which were announced. `table` is the place, in this rank's heap, of a list with one
  /// offset for each part.
  void publish_parts(std::uint64_t number, std::int64_t table);
  /// This rank needs nothing more of its peers for that call.
  void set_done(std::uint64_t number);
  /// No peer needs anything more of this rank for that call.
  bool all_done(std::uint64_t number) const;

  /// Compares this rank's calls, up to that one, with those of the rank before it, as far as that one has come: true if up to that one.
  /// Throws RowFailure if they differ. Under the lock of all that advance.
  bool compare(std::uint64_t number);
  int previous() const { return (rank_ + size_ - 1) % size_; }

  /// What a peer does as its call `number`; null if it has not come to it. While this rank is not done with it.
  const Call* call_of(int peer, std::uint64_t number) const;
  /// The offsets of its parts; null if it has not published them.
  const std::int64_t* parts_of(int peer, std::uint64_t number) const;
  /// The i-th of them. Of a peer that has given up it may be anything, but can be read.
  const char* part_of(int peer, const std::int64_t* parts, std::size_t i, std::int64_t bytes) const;

  /// This rank gives up.
  void revoke();
  bool is_revoked(int peer) const;

  /// The peer needs nothing more of others for that call, nor can it fail any more because of it.
  bool is_done(int peer, std::uint64_t number) const;
  /// The peer's process has ended (see PeerHeap).
  bool has_ended(int peer) const { return heaps_[static_cast<std::size_t>(peer)]->has_lost_owner(); }

  HostMemory& host_memory() { return *host_memory_; }
  int rank() const { return rank_; }
  int size() const { return size_; }
  int first() const { return first_; }
  std::chrono::milliseconds timeout() const { return timeout_; }

 private:
  // So many calls a rank may be ahead of its peers. A step has at most a few collectives per unit under way, and a mailbox of that many
  // calls takes 30 KiB.
  static constexpr std::size_t kCalls = 64;

  struct Publication {
    std::atomic<std::uint64_t> number;  // 0 while it is written
    std::atomic<std::int64_t> table;    // 0 until it is known
    Call call;
  };
  struct Mailbox {
    std::atomic<std::uint32_t> revoked;
    std::array<Publication, kCalls> publications;
    std::array<std::atomic<std::uint64_t>, kCalls> done;
  };

  SharedRow(std::chrono::milliseconds timeout, std::shared_ptr<HostMemory> host_memory);
  const Publication* publication_of(int peer, std::uint64_t number) const;

  int rank_ = 0;
  int size_ = 1;
  int first_ = 0;
  const std::chrono::milliseconds timeout_;
  const std::shared_ptr<HostMemory> host_memory_;
  c10::DataPtr memory_;  // of the mailbox
  Mailbox* mailbox_ = nullptr;
  std::vector<std::shared_ptr<const PeerHeap>> heaps_;  // by rank; this one's is null
  std::vector<const Mailbox*> mailboxes_;               // by rank
  struct OwnCall {
    Call call;
    bool has_parts;
  };
  std::deque<OwnCall> uncompared_;
  std::uint64_t newest_ = 0;
};

}  // namespace fsdp::comm
