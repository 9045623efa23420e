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

/// The ranks of a row that read each other's memory: all ranks of the row, or those of one host. It knows which collective each of them has
/// reached, and where their buffers lie. The ranks are numbered from 0 here; `first()` is the number of the first one in the row.
///
/// [Note: Memory instead of messages] Each rank has a mailbox in its heap, which it alone writes. In it, the rank writes the Call of each
/// of the row's collectives in turn, and for a gather or a reduction also the offsets of its buffers in its heap. The other ranks compare
/// the Call with their own, and read the buffers where they are. A rank that has read everything that it needs marks this in its own
/// mailbox. When all peers have done so, a rank may reuse its buffers. A rank that fails revokes its mailbox before it reuses them. A peer
/// that has read from the buffers meanwhile sees this, and does not use the data.
class SharedRow {
 public:
  /// Finds out which ranks of a row can read each other's memory. The result has all of them, or the neighbours of this rank if the row
  /// consists of hosts with equal numbers of ranks, one host's ranks after the other's. Otherwise it is null on all ranks. If the system
  /// refuses a call, it prints one line on stderr per process; it prints nothing if ranks are on different hosts or in different
  /// containers. `rank` is this rank's position among the global ranks of the row. Collective over `gloo`. Throws std::runtime_error if a
  /// message can't be sent or received.
  static std::shared_ptr<SharedRow> connect(int rank, const std::vector<std::int64_t>& global_ranks, c10d::Backend& gloo, bool wanted,
                                            std::chrono::milliseconds timeout);
  ~SharedRow();
  SharedRow(const SharedRow&) = delete;
  SharedRow& operator=(const SharedRow&) = delete;

  /// True if the mailbox has room for one more call: peers no longer need the call whose place it would take. It also compares calls.
  bool has_room();
  /// Publishes this rank's next call.
  void publish(const Call& call);
  /// Marks this rank's newest call as one with parts. It is then finished only after set_done().
  void announce_parts();
  /// Publishes where the announced parts of call `number` lie. `table` is the offset, in this rank's heap, of a list that holds the offset
  /// of each part.
  void publish_parts(std::uint64_t number, std::int64_t table);
  /// Marks that this rank needs nothing more from its peers for call `number`.
  void set_done(std::uint64_t number);
  /// True if no peer needs anything more from this rank for call `number`.
  bool all_done(std::uint64_t number) const;

  /// Compares this rank's calls up to `number` with those of the rank before it, as far as that rank has made them. Returns true once all
  /// of them are compared. Throws RowFailure if they differ. Call it under the lock that all advancing collectives share.
  bool compare(std::uint64_t number);
  int previous() const { return (rank_ + size_ - 1) % size_; }

  /// Returns a peer's call `number`; null if the peer has not made it yet. The result is valid until this rank's set_done() for that call.
  const Call* call_of(int peer, std::uint64_t number) const;
  /// Returns the offsets of the parts of a peer's call; null if the peer has not published them.
  const std::int64_t* parts_of(int peer, std::uint64_t number) const;
  /// Returns the address of the i-th part. If the peer has failed, the memory can be read, but its contents are undefined.
  const char* part_of(int peer, const std::int64_t* parts, std::size_t i, std::int64_t bytes) const;

  /// Marks for the peers that this rank has failed.
  void revoke();
  bool is_revoked(int peer) const;

  /// True if the peer needs nothing more of other ranks for that call, and can no longer fail because of it.
  bool is_done(int peer, std::uint64_t number) const;
  /// True if the peer's process has ended (see PeerHeap).
  bool has_ended(int peer) const { return heaps_[static_cast<std::size_t>(peer)]->has_lost_owner(); }

  HostMemory& host_memory() { return *host_memory_; }
  int rank() const { return rank_; }
  int size() const { return size_; }
  int first() const { return first_; }
  std::chrono::milliseconds timeout() const { return timeout_; }

 private:
  // The number of calls by which a rank may be ahead of its peers. A step has at most a few collectives per unit under way, and a mailbox
  // of that many calls takes 30 KiB.
  static constexpr std::size_t kCalls = 64;

  struct Publication {
    std::atomic<std::uint64_t> number;  // 0 while the entry is being written
    std::atomic<std::int64_t> table;    // 0 until the offset is known
    Call call;
  };
  struct Mailbox {
    std::atomic<std::uint32_t> revoked;
    std::array<Publication, kCalls> publications;
    std::array<std::atomic<std::uint64_t>, kCalls> done;
  };

  SharedRow(std::chrono::milliseconds timeout, std::shared_ptr<HostMemory> host_memory);
  int global_rank(int peer) const { return global_ranks_[static_cast<std::size_t>(peer)]; }
  const Publication* publication_of(int peer, std::uint64_t number) const;

  int rank_ = 0;
  int size_ = 1;
  int first_ = 0;
  std::vector<int> global_ranks_;  // by rank
  const std::chrono::milliseconds timeout_;
  const std::shared_ptr<HostMemory> host_memory_;
  c10::DataPtr memory_;  // the memory of this rank's mailbox
  Mailbox* mailbox_ = nullptr;
  std::vector<std::shared_ptr<const PeerHeap>> heaps_;  // by rank; null for this rank
  std::vector<const Mailbox*> mailboxes_;               // by rank
  struct OwnCall {
    Call call;
    bool has_parts;
  };
  std::deque<OwnCall> uncompared_;
  std::uint64_t newest_ = 0;
};

}  // namespace fsdp::comm
