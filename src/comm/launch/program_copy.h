#pragma once

#include <sys/types.h>

#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "comm/launch/rank_output.h"

// Ranks that are this program, run again with its own arguments: where threads run already, a fork would copy locked locks.
namespace fsdp::comm {

using Environment = std::vector<std::pair<std::string, std::string>>;

/// What a copy is told by the process that started it.
struct ProgramCopy {
  int report_fd = -1;                ///< Where the rank reports how it ended.
  std::vector<int> earlier_results;  ///< Of the launches before the one that started the copy, which it must not run again.
};

/// What this process was told; nothing if it is no copy. Whatever it starts itself is none: ask once.
std::optional<ProgramCopy> take_own_copy();

/// Starts a copy with `environment` added to this process's own, which inherits `open_fds` besides its report's, and writes to `output`.
/// It is told `told`, and reports itself if the program can't be run. Throws Error if there can be no process.
pid_t start_copy(Environment environment, const ProgramCopy& told, std::span<const int> open_fds, std::span<const PrefixedStream> output);

/// Call it in a child: a rank must not outlive its parent, however that ends (Ctrl-C, SIGTERM, SIGKILL).
void die_with_parent(pid_t parent);

/// How a rank's report begins, once its function runs; and what follows, once it does no longer: it returned (with its exit code), or a
/// text says why not. A rank that only noticed that a peer failed is not printed where a rank failed of its own.
inline constexpr char kBegan = 'B';
inline constexpr char kReturned = 'R';
inline constexpr char kFailed = 'F';
inline constexpr char kPeerFailed = 'P';

}  // namespace fsdp::comm
