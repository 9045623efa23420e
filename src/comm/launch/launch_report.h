#pragma once

#include <chrono>
#include <vector>

#include "comm/launch/rank_process.h"

namespace fsdp::comm {

/// Prints to stderr why ranks have failed, in the order in which they ended: the ranks that did not fail because of a peer, or all if there
/// is no such rank. A text that several ranks have is printed once. Returns the exit code of the launch.
int report_failures(const std::vector<RankProcess>& ranks, const std::vector<RankProcess*>& failures, std::chrono::milliseconds grace);

}  // namespace fsdp::comm
