#pragma once

#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <utility>
#include <vector>

#include "comm/launch/rank_output.h"

namespace fsdp::comm {

/// The first letter of a rank's report: its function returned (with its exit code), or it failed (with the reason as a text). kPeerFailed
/// means that the rank failed only because of a peer; its text is not printed if another rank failed by itself.
inline constexpr char kReturned = 'R';
inline constexpr char kFailed = 'F';
inline constexpr char kPeerFailed = 'P';

/// A rank, as seen by the process that has started it.
struct RankProcess {
  int rank = 0;
  pid_t pid = -1;
  int report_fd = -1;                       ///< -1 once its other end is closed.
  std::string report;                       ///< Empty if the process ended before it could report.
  std::vector<PrefixedStream> output = {};  ///< Its stdout and stderr, where LaunchOptions::prefix_output holds.
  bool running = true;
  bool stopped_by_us = false;
  bool collected_elsewhere = false;  ///< Other code of this program has collected `status` first.
  int status = 0;

  bool returned() const { return report.starts_with(kReturned); }
  bool noticed_a_peer() const { return report.starts_with(kPeerFailed); }
  bool failed() const { return !running && !(returned() && WIFEXITED(status) && WEXITSTATUS(status) == 0); }
};

}  // namespace fsdp::comm
