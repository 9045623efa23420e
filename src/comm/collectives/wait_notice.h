#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "comm/collectives/store_progress.h"

namespace fsdp::comm {

/// Says on stderr for whom a rank waits, and what that rank was last doing, when a wait takes long: 30 s, or as many as the environment
/// variable FSDP_WAIT_NOTICE says (0: never). Each wait for a collective is told once. What other ranks do is read from their files of
/// events, if FSDP_EVENTS makes them keep some in a folder that this rank sees; ranks of other hosts are asked by the store.
class WaitNotice {
 public:
  using Time = std::chrono::steady_clock::time_point;

  /// `source` is the row's source of events. `progress` is null where all ranks of the row are on this host.
  WaitNotice(std::vector<std::int64_t> global_ranks, int rank, std::uint32_t source, std::shared_ptr<StoreProgress> progress);

  /// How ranks tell each other by a store, of which nobody else uses the keys; null if no wait is ever told. `rank`: global.
  static std::shared_ptr<StoreProgress> progress_by(c10::intrusive_ptr<c10d::Store> store, std::int64_t rank);

  /// True if the wait, which has begun at `since`, has taken so long that somebody should know. Any thread; fast.
  static bool is_due(Time since);
  /// Says for which position of the row this one waits, unless that has been said of this wait. `last_call` is what that rank has called
  /// last, as far as it is known. It returns at once: a thread of its own does it. Any thread.
  static void tell(const std::shared_ptr<WaitNotice>& notice, int peer, Time since, const std::string& last_call = {}) noexcept;

 private:
  /// The wait for a collective of the row, as this process's events have it.
  struct OwnWait {
    std::uint64_t number = 0;
    std::string text;
  };

  /// Empty if the wait has ended meanwhile.
  std::string text(int peer, Time since, const std::string& last_call) const;
  OwnWait own_wait() const;
  /// From the rank's file of events; none if it can't be read.
  std::optional<RankProgress> read_progress(std::int64_t rank) const;

  const std::vector<std::int64_t> global_ranks_;
  const int rank_;
  const std::uint32_t source_;
  const std::shared_ptr<StoreProgress> progress_;
  std::atomic<std::uint64_t> told_{0};  ///< The number of the collective of which it has spoken last.
};

}  // namespace fsdp::comm
