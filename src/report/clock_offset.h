#pragma once

#include <cstdint>

#include "comm/mesh/ranks.h"

namespace fsdp::report {

/// Nanoseconds of std::chrono::steady_clock.
std::int64_t now();

/// By how much this rank's clock is ahead of the first rank's, in ns. Exactly 0 on the hosts whose ranks all have one clock. Between hosts
/// it is half of the difference of the shortest times that messages took there and back (NTP's way), over several exchanges. Collective.
std::int64_t clock_offset(const comm::Ranks& ranks);

}  // namespace fsdp::report
