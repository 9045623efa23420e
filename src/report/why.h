#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "report/rank_now.h"

// Finds why ranks wait, or have ended, from the files that they keep with FSDP_EVENTS. It needs neither communication nor a running rank.
namespace fsdp::report {

/// The problem of the rank that the others wait for.
enum class Cause : std::uint8_t {
  kNothing,     ///< No rank waits, and none has failed.
  kOtherCall,   ///< It is in another collective than its peers.
  kDead,        ///< Its process has ended.
  kFailed,      ///< It has failed before all other ranks, and has recorded the error.
  kStopped,     ///< Its process is stopped (SIGSTOP, Ctrl-Z).
  kDebugged,    ///< A debugger holds its process.
  kDataLoader,  ///< It waits for its next batch.
  kSlow,        ///< It makes progress, but is late.
  kNotArrived,  ///< It runs, makes no progress, and has not made the call.
  kEachOther,   ///< Ranks wait for each other, in collectives of several rows.
  kLink,        ///< All ranks have made the call, and the data do not arrive.
  kNoFile,      ///< It has no file.
};

struct Why {
  Cause cause = Cause::kNothing;
  std::int64_t rank = -1;  ///< The rank that is the cause; -1 if no single one is.
  std::string text;        ///< A paragraph.
};

/// Returns the lines of a rank's program where it is now, the innermost last; nothing if they are not known.
using LinesOf = std::function<std::vector<std::string>(std::int64_t rank)>;

/// Explains what the ranks of one run wait for. Files of some ranks may be missing. Throws Error if there is none.
Why explain(const std::vector<RankNow>& ranks, const LinesOf& lines_of);
/// The same, with lines_of_program().
Why explain(const std::vector<RankNow>& ranks);

}  // namespace fsdp::report
