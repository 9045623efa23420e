#pragma once

#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/launch/program_copy.h"
#include "comm/launch/rank_output.h"

namespace fsdp::comm {

/// A rank, as seen by the process that has started it.
struct RankProcess {
  int rank = 0;
  pid_t pid = -1;
  int report_fd = -1;  ///< -1 once its other end is closed.
  std::string report;
  std::vector<PrefixedStream> output = {};  ///< Its stdout and stderr, where LaunchOptions::prefix_output holds.
  bool running = true;
  bool stopped_by_us = false;
  bool collected_elsewhere = false;  ///< Other code of this program has collected `status` first.
  int status = 0;

  bool began() const { return report.starts_with(kBegan); }
  /// The part of the report after kBegan; empty if the process ended before it could report more.
  std::string_view ending() const { return std::string_view(report).substr(began() ? 1 : 0); }
  bool returned() const { return ending().starts_with(kReturned); }
  bool noticed_a_peer() const { return ending().starts_with(kPeerFailed); }
  bool failed() const { return !running && !(returned() && WIFEXITED(status) && WEXITSTATUS(status) == 0); }
};

}  // namespace fsdp::comm
