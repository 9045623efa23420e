#pragma once

#include <sys/types.h>

#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "comm/launch/rank_output.h"

// Ranks that run this program again with its own arguments. They are used if threads already run, because a fork would copy locked locks.
namespace fsdp::comm {

using Environment = std::vector<std::pair<std::string, std::string>>;

/// The facts that the process which starts a copy passes to it.
struct ProgramCopy {
  int report_fd = -1;  ///< Where the rank reports how it ended.
  std::vector<int>
      earlier_results;  ///< The results of the launches before the one that started the copy. The copy must not run these again.
};

/// Returns what this process was told; nothing if it is not a copy. It also removes the information, so that programs which this process
/// starts do not take themselves for copies. Call it once.
std::optional<ProgramCopy> take_own_copy();

/// Starts a copy with `environment` added to this process's own. The copy inherits `open_fds` and the descriptor for its report, writes to
/// `output`, and is passed `told`. If the program can't be run, the copy reports that. Throws Error if no process can be started.
pid_t start_copy(Environment environment, const ProgramCopy& told, std::span<const int> open_fds, std::span<const PrefixedStream> output);

/// Makes this process end with its parent. Call it in a child, because a rank must not outlive its parent, however that ends (Ctrl-C,
/// SIGTERM, SIGKILL).
void die_with_parent(pid_t parent);

/// The letters of a rank's report. It begins with kBegan once the rank's function runs. When the function has ended, another letter
/// follows: it returned (with its exit code), or it failed (with a text that says why). kPeerFailed says that the rank failed only because
/// of a peer; its text is not printed if another rank failed by itself.
inline constexpr char kBegan = 'B';
inline constexpr char kReturned = 'R';
inline constexpr char kFailed = 'F';
inline constexpr char kPeerFailed = 'P';

}  // namespace fsdp::comm
