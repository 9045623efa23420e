#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/wait_reason.h"
#include "report/clock_alignment.h"
#include "report/event_files.h"
#include "report/waits.h"
#include "report/why.h"

// The timeline of all ranks, from the files that they keep with FSDP_EVENTS. Times are in ns, of the first rank's clock.
namespace fsdp::report {

using events::BytesByKind;
using events::ComputeSpan;
using events::MemoryMoment;
using events::MemoryPeak;
using events::StepSpan;

/// Where a rank's collectives are drawn.
enum class Lane : std::uint8_t {
  kGather,  ///< All-gathers of a unit.
  kReduce,  ///< Reduce-scatters of a unit.
  kOuter,   ///< All-gathers and reductions over the outer ranks.
  kHost,    ///< All other exchanges between hosts.
};

/// The times of a collective.
struct CollectiveTimes {
  std::int64_t began = 0;       ///< The call or, if that is no longer kept, the wait.
  std::int64_t wait_began = 0;  ///< 0: there was no wait for it.
  std::int64_t arrived = 0;     ///< 0: not known.
  std::int64_t ended = 0;       ///< If it has not ended: the last record of all ranks or, if its process is dead, of that rank.
};

/// One collective on one rank.
struct CollectiveSpan {
  enum class State : std::uint8_t { kDone, kOpen, kFailed };

  Lane lane = Lane::kHost;
  std::uint32_t track = 0;  ///< Those of one lane and track do not overlap.
  std::uint32_t unit = 0;   ///< A name, as the next two.
  std::uint32_t operation = 0;
  std::uint32_t row = 0;
  std::uint64_t number = 0;
  std::int64_t bytes = 0;
  CollectiveTimes times;
  bool in_backward = false;
  State state = State::kDone;
  std::array<std::int64_t, kWaitReasons> reasons = {};  ///< Of the wait, in ns, by WaitReason; they add up to it.
  /// The rank for which this one waited: the last of the others to make the call or, if that one waited for a rank itself, that rank, and
  /// so on. -1: no rank was late.
  std::int64_t late_rank = -1;
  std::uint32_t late_rank_was = 0;  ///< What it was doing; a name.
};
/// From the beginning of the wait to its end; 0 if there was no wait.
std::int64_t waited(const CollectiveSpan& collective);
/// Whether there was a wait, and it did not end.
bool is_unfinished(const CollectiveSpan& collective);

/// The timeline of one rank and its engine. The last step, if it has not ended, ends with the rank's last moment.
struct RankTimeline : events::EngineReplay {
  events::EventWriter writer;
  ClockOffset clock;
  std::vector<CollectiveSpan> collectives;  ///< By the time of the call.
};

struct Timeline {
  std::int64_t began = 0;
  std::int64_t ended = 0;
  std::vector<std::string> names;  ///< The first is empty.
  std::vector<RankTimeline> ranks;
  std::vector<std::int64_t> missing;  ///< Ranks that have left no file.
  Why why;                            ///< Why waits do not end, or ranks have ended; otherwise Cause::kNothing.
};

/// The first and the last step to show.
using StepRange = std::pair<std::int64_t, std::int64_t>;

/// Returns the timeline of the ranks. Each wait is divided among its reasons as step_report() does. With `steps`, events outside of them
/// are left out. Throws Error if there are no ranks, or if no rank has any of the steps.
Timeline timeline_of(std::vector<RankEvents> run, const std::optional<StepRange>& steps = {});

}  // namespace fsdp::report
