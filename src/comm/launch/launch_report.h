#pragma once

#include <chrono>
#include <cstddef>
#include <vector>

#include "comm/launch/rank_process.h"

namespace fsdp::comm {

/// Prints to stderr why ranks have failed, in the order in which they ended: the ranks that did not fail because of a peer, or all if there
/// is no such rank. A text that several ranks have is printed once. `call` is the number of the launch, from 1, if the ranks are copies of
/// the program, and 0 otherwise. Returns the exit code of the launch.
int report_failures(const std::vector<RankProcess>& ranks, const std::vector<RankProcess*>& failures, std::size_t call,
                    std::chrono::milliseconds grace);

}  // namespace fsdp::comm
