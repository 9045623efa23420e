#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "report/rank_now.h"

// Why ranks wait, or have ended, from the files that FSDP_EVENTS makes them keep. No communication, and no rank is needed.
namespace fsdp::report {

/// What is wrong with the rank that the others wait for.
enum class Cause : std::uint8_t {
  kNothing,     ///< No rank waits, and none has failed.
  kOtherCall,   ///< It is in another collective than its peers.
  kDead,        ///< Its process has ended.
  kFailed,      ///< It has failed before anybody else, and says with what.
  kStopped,     ///< Its process is stopped (SIGSTOP, Ctrl-Z).
  kDebugged,    ///< A debugger holds its process.
  kDataLoader,  ///< It waits for its next batch.
  kSlow,        ///< It moves on, and comes late.
  kNotArrived,  ///< It runs, does not move, and has not made the call.
  kEachOther,   ///< Ranks wait for each other, in collectives of several rows.
  kLink,        ///< All ranks have made the call, and the data do not arrive.
  kNoFile,      ///< There is no file of it.
};

struct Why {
  Cause cause = Cause::kNothing;
  std::int64_t rank = -1;  ///< The rank that is the cause; -1 if no single one is.
  std::string text;        ///< A paragraph.
};

/// Returns the lines of a rank's program where it is now, the innermost last; nothing if it can't tell.
using LinesOf = std::function<std::vector<std::string>(std::int64_t rank)>;

/// Explains what the ranks of one run wait for. Files of some may be missing. Throws Error if there is none.
Why explain(const std::vector<RankNow>& ranks, const LinesOf& lines_of);
/// The same, with lines_of_program().
Why explain(const std::vector<RankNow>& ranks);

}  // namespace fsdp::report
