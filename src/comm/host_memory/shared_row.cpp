#include "comm/host_memory/shared_row.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <iostream>
#include <mutex>
#include <new>
#include <string>
#include <utility>

#include "base/exception_text.h"
#include "comm/host_memory/hosts.h"
#include "comm/host_memory/progress.h"
#include "fsdp/error.h"

namespace fsdp::comm {
namespace {

/// The facts that ranks exchange before they try to map each other's heaps.
struct HostFacts {
  Boot boot;
  std::int64_t user = -1;
  std::uint64_t processes = 0;  ///< The PID namespace, in which process numbers are valid.
  std::int64_t ready = 0;       ///< Whether this rank wants to share and has a heap.
  HeapAddress heap;
  std::int64_t mailbox = 0;
};

constexpr int kHostFacts = 0x20000002;  // tags of messages, beside those in call.h
constexpr int kVerdict = 0x20000003;

void say_once(const std::string& reason) {
  static std::once_flag said;
  std::call_once(said, [&] {
    std::cerr << "libfsdp: the ranks of this host do not share memory, and send messages instead: " + reason +
                     ". FSDP_SHARED_MEMORY=0 turns the attempt off.\n"
              << std::flush;
  });
}

HostFacts own_host_facts() {
  HostFacts mine;
  mine.boot = Boot::of_this_host();
  mine.user = geteuid();
  struct stat processes {};
  if (stat("/proc/self/ns/pid", &processes) == 0) mine.processes = processes.st_ino;
  return mine;
}

/// True if the two ranks may be able to read each other's memory.
bool are_near(const HostFacts& a, const HostFacts& b) { return a.user == b.user && a.processes == b.processes && a.boot == b.boot; }

/// The ranks next to each other that read each other's memory.
struct Neighbours {
  std::int64_t first;
  std::int64_t count;
};

Neighbours neighbours_of(int rank, const std::vector<std::shared_ptr<const PeerHeap>>& found) {
  const auto is_near = [&](int peer) { return peer == rank || found[static_cast<std::size_t>(peer)] != nullptr; };
  int first = rank;
  int end = rank + 1;
  while (first > 0 && is_near(first - 1)) --first;
  while (end < static_cast<int>(found.size()) && is_near(end)) ++end;
  return {.first = first, .count = end - first};
}

}  // namespace

std::shared_ptr<SharedRow> SharedRow::connect(int rank, const std::vector<std::int64_t>& global_ranks, c10d::Backend& gloo, bool wanted,
                                              std::chrono::milliseconds timeout) {
  const auto size = static_cast<int>(global_ranks.size());
  HostFacts mine = own_host_facts();
  std::shared_ptr<SharedRow> row;
  try {
    if (wanted) row.reset(new SharedRow(timeout, HostMemory::open()));
  } catch (...) {
    say_once(current_exception_text());
  }
  if (row != nullptr) {
    mine.ready = 1;
    mine.heap = row->host_memory_->address();
    mine.mailbox = *row->host_memory_->heap().offset_of(row->mailbox_);
  }
  const auto all = exchange_records(rank, global_ranks, gloo, kHostFacts, mine);
  std::vector<std::shared_ptr<const PeerHeap>> found(all.size());
  try {
    for (int peer = 0; peer < size && mine.ready == 1; ++peer) {
      const auto& theirs = all[static_cast<std::size_t>(peer)];
      if (theirs.ready == 0 || !are_near(theirs, mine)) continue;
      // Ranks that are threads of one process have the same heap, so they can't be distinguished by it.
      if (theirs.heap.nonce != mine.heap.nonce) found[static_cast<std::size_t>(peer)] = row->host_memory_->peer(theirs.heap);
    }
  } catch (...) {
    found.assign(all.size(), nullptr);
    say_once(current_exception_text());
  }
  const Neighbours neighbours = neighbours_of(rank, found);
  const auto verdicts = exchange_records(rank, global_ranks, gloo, kVerdict, neighbours);
  for (int peer = 0; peer < size; ++peer) {
    const auto& theirs = verdicts[static_cast<std::size_t>(peer)];
    if (theirs.count != neighbours.count || theirs.count < 2 || theirs.first != peer / theirs.count * theirs.count) return nullptr;
  }
  row->first_ = static_cast<int>(neighbours.first);
  row->size_ = static_cast<int>(neighbours.count);
  row->rank_ = rank - row->first_;
  for (int peer = row->first_; peer < row->first_ + row->size_; ++peer) {
    const auto& heap = row->heaps_.emplace_back(std::move(found[static_cast<std::size_t>(peer)]));
    const std::int64_t mailbox = all[static_cast<std::size_t>(peer)].mailbox;
    row->global_ranks_.push_back(static_cast<int>(global_ranks[static_cast<std::size_t>(peer)]));
    row->mailboxes_.push_back(peer == rank ? row->mailbox_ : reinterpret_cast<const Mailbox*>(heap->at(mailbox)));
  }
  peers_changed();
  return row;
}

SharedRow::SharedRow(std::chrono::milliseconds timeout, std::shared_ptr<HostMemory> host_memory)
    : timeout_(timeout), host_memory_(std::move(host_memory)) {
  memory_ = host_memory_->heap().allocate(sizeof(Mailbox));
  if (!memory_) throw Error("no room for a mailbox");
  std::memset(memory_.get(), 0, sizeof(Mailbox));
  mailbox_ = new (memory_.get()) Mailbox();
}

SharedRow::~SharedRow() {
  host_memory_->keep_for_late_peers(std::move(memory_));
  heaps_.clear();
  peers_changed();
}

bool SharedRow::has_room() {
  if (newest_ < kCalls || all_done(newest_ + 1 - kCalls)) return true;
  compare(newest_);  // Peers may have no room either, until this rank is done with something.
  return all_done(newest_ + 1 - kCalls);
}

void SharedRow::publish(const Call& call) {
  newest_ = call.number;
  uncompared_.push_back({.call = call, .has_parts = false});
  auto& place = mailbox_->publications[newest_ % kCalls];
  place.table.store(0, std::memory_order_relaxed);
  place.call = call;
  place.number.store(newest_, std::memory_order_release);
  host_memory_->wake_peers();
}

void SharedRow::announce_parts() { uncompared_.back().has_parts = true; }

void SharedRow::publish_parts(std::uint64_t number, std::int64_t table) {
  mailbox_->publications[number % kCalls].table.store(table, std::memory_order_release);
  host_memory_->wake_peers();
}

void SharedRow::set_done(std::uint64_t number) {
  mailbox_->done[number % kCalls].store(number, std::memory_order_release);
  host_memory_->wake_peers();
}

bool SharedRow::all_done(std::uint64_t number) const {
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_ && !is_done(peer, number)) return false;
  }
  return true;
}

bool SharedRow::is_done(int peer, std::uint64_t number) const {
  return mailboxes_[static_cast<std::size_t>(peer)]->done[number % kCalls].load(std::memory_order_acquire) >= number;
}

const SharedRow::Publication* SharedRow::publication_of(int peer, std::uint64_t number) const {
  const auto& place = mailboxes_[static_cast<std::size_t>(peer)]->publications[number % kCalls];
  return place.number.load(std::memory_order_acquire) == number ? &place : nullptr;
}

const Call* SharedRow::call_of(int peer, std::uint64_t number) const {
  const auto* const place = publication_of(peer, number);
  return place == nullptr ? nullptr : &place->call;
}

const std::int64_t* SharedRow::parts_of(int peer, std::uint64_t number) const {
  const auto* const place = publication_of(peer, number);
  const std::int64_t table = place == nullptr ? 0 : place->table.load(std::memory_order_acquire);
  return table == 0 ? nullptr : reinterpret_cast<const std::int64_t*>(heaps_[static_cast<std::size_t>(peer)]->at(table));
}

const char* SharedRow::part_of(int peer, const std::int64_t* parts, std::size_t i, std::int64_t bytes) const {
  const PeerHeap& heap = *heaps_[static_cast<std::size_t>(peer)];
  const std::int64_t offset = static_cast<const volatile std::int64_t*>(parts)[i];  // Read once: its owner may have given up meanwhile.
  return heap.at(offset >= 0 && offset <= heap.size() - bytes ? offset : 0);
}

bool SharedRow::compare(std::uint64_t number) {
  while (!uncompared_.empty() && uncompared_.front().call.number <= number) {
    const auto& [mine, has_parts] = uncompared_.front();
    // A gather or a reduction that this rank has finished was compared with all peers, and the previous rank may have continued.
    if (mailbox_->done[mine.number % kCalls].load(std::memory_order_relaxed) < mine.number) {
      const Call* const theirs = call_of(previous(), mine.number);
      // If a rank has failed, its alarm has the reason.
      if (theirs == nullptr || is_revoked(previous())) return false;
      if (*theirs != mine) throw RowFailure(describe_divergence(mine, global_rank(rank_), *theirs, global_rank(previous())));
      if (!has_parts) set_done(mine.number);
    }
    uncompared_.pop_front();
  }
  return true;
}

void SharedRow::revoke() {
  mailbox_->revoked.store(1, std::memory_order_seq_cst);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  host_memory_->wake_peers();
}

bool SharedRow::is_revoked(int peer) const {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return mailboxes_[static_cast<std::size_t>(peer)]->revoked.load(std::memory_order_seq_cst) != 0;
}

}  // namespace fsdp::comm
