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

/// Prints on stderr which rank this one waits for, and what that rank was last doing, when a wait takes long: 30 s, or the value of the
/// environment variable FSDP_WAIT_NOTICE (0: never). Each wait for a collective is reported once. The activities of other ranks are read
/// from their files of events, if FSDP_EVENTS names a folder that this rank can read; ranks of other hosts are asked through the store.
class WaitNotice {
 public:
  using Time = std::chrono::steady_clock::time_point;

  /// `source` is the row's source of events. `progress` is null if all ranks of the row are on this host.
  WaitNotice(std::vector<std::int64_t> global_ranks, int rank, std::uint32_t source, std::shared_ptr<StoreProgress> progress);

  /// Returns the exchange of activities through a store, whose keys are used only there; null if no wait is ever reported. `rank`: global.
  static std::shared_ptr<StoreProgress> progress_by(c10::intrusive_ptr<c10d::Store> store, std::int64_t rank);

  /// True if the wait, which began at `since`, has taken so long that it is to be reported. Any thread; fast.
  static bool is_due(Time since);
  /// Reports which position of the row this rank waits for, unless this wait was reported already. `last_call` is the last known call of
  /// that rank. It returns at once, because a thread of its own does the work. Any thread.
  static void tell(const std::shared_ptr<WaitNotice>& notice, int peer, Time since, const std::string& last_call = {}) noexcept;

 private:
  /// The wait for a collective of the row, according to this process's events.
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
  std::atomic<std::uint64_t> told_{0};  ///< The number of the collective that was reported last.
};

}  // namespace fsdp::comm
