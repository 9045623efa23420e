#pragma once

#include <cstdint>
#include <vector>

#include "report/event_files.h"

// The clocks of several hosts, from nothing but the events that their ranks have left.
namespace fsdp::report {

/// How the clock of a rank's host differs from that of the first rank.
struct ClockOffset {
  std::int64_t ahead = 0;   ///< In ns: this much has to be taken from a time of the rank. 0 if both have one clock.
  std::int64_t within = 0;  ///< The true value lies no further away than this, in ns; -1 if that is not known.
};

/// Compares clocks by collectives: a rank can't have what another one sends before that one has made its call. Each collective of a row
/// thus says by how much the one clock is ahead of the other at least, or at most, and the middle between the tightest of these is taken,
/// as NTP does. Where hosts have no such collective, even by way of others, the clocks are those that the hosts themselves set.
///
/// By position in `ranks`.
std::vector<ClockOffset> clock_offsets(const std::vector<RankEvents>& ranks);

}  // namespace fsdp::report
