#pragma once

#include <cstdint>
#include <functional>

#include "comm/mesh/ranks.h"

namespace fsdp::report {

/// Nanoseconds of std::chrono::steady_clock.
std::int64_t now();

/// Returns by how much this rank's clock is ahead of the first rank's, in ns: 0 if all ranks have one clock, as those of one host have, and
/// measured_offset() otherwise. Collective.
std::int64_t clock_offset(const comm::Ranks& ranks);

/// Returns it for any clock in ns: half of the difference of the shortest times that messages between the two ranks took there and back (as
/// NTP does), over several exchanges. Collective.
std::int64_t measured_offset(const comm::Ranks& ranks, const std::function<std::int64_t()>& clock);

}  // namespace fsdp::report
