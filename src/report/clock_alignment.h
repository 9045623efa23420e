#pragma once

#include <cstdint>
#include <vector>

#include "report/event_files.h"

// The clocks of several hosts, computed from the events of their ranks alone.
namespace fsdp::report {

/// How the clock of a rank's host differs from that of the first rank.
struct ClockOffset {
  std::int64_t ahead = 0;   ///< In ns: to be subtracted from a time of the rank. 0 if both have one clock.
  std::int64_t within = 0;  ///< The true value lies no further away than this, in ns; -1 if that is not known.
};

/// Compares clocks by collectives: a rank can't receive the data of another one before that one has made its call. Each collective of a row
/// therefore gives a lower or an upper limit of the difference of two clocks. The result is the middle between the tightest limits, as in
/// NTP. If hosts have no such collective, even through other hosts, their clocks are not changed.
///
/// By position in `ranks`.
std::vector<ClockOffset> clock_offsets(const std::vector<RankEvents>& ranks);

}  // namespace fsdp::report
