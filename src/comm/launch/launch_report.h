#pragma once

#include <chrono>
#include <cstddef>
#include <vector>

#include "comm/launch/rank_process.h"

namespace fsdp::comm {

/// Prints to stderr why ranks have failed, in the order in which they ended: those that failed of their own, or all if there is none. A
/// text that several ranks have is printed once. `call`: the number of the launch, from 1, if the ranks are copies of the program; else 0.
/// Returns the exit code of the launch.
int report_failures(const std::vector<RankProcess>& ranks, const std::vector<RankProcess*>& failures, std::size_t call,
                    std::chrono::milliseconds grace);

}  // namespace fsdp::comm
