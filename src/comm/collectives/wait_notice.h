#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::comm {

/// Says on stderr for whom a rank waits, and what that rank was last doing, when a wait takes long: 30 s, or as many as the environment
/// variable FSDP_WAIT_NOTICE says (0: never). Each wait for a collective is told once. What other ranks do is read from their files of
/// events, if FSDP_EVENTS makes them keep some in a folder that this rank sees.
class WaitNotice {
 public:
  using Time = std::chrono::steady_clock::time_point;

  /// `source` is the row's source of events.
  WaitNotice(std::vector<std::int64_t> global_ranks, int rank, std::string row_name, std::uint32_t source);

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
  /// What another rank does, as its file of events has it.
  struct Peer;

  std::string text(int peer, Time since, const std::string& last_call) const;
  OwnWait own_wait() const;
  bool look_up(std::int64_t rank, Peer& peer) const;

  const std::vector<std::int64_t> global_ranks_;
  const int rank_;
  const std::string row_name_;
  const std::uint32_t source_;
  std::atomic<std::uint64_t> told_{0};  ///< The number of the collective of which it has spoken last.
};

}  // namespace fsdp::comm
