#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string_view>
#include <vector>

#include "events/activity.h"
#include "events/event.h"
#include "events/event_ring.h"

// A model of what a rank did, from the events of its process. All code that reads events uses this model, so that results agree. Times are
// in ns; 0: there is no such event. Names are numbers, as in events.
namespace fsdp::events {

/// Returns the text of a name in events.
using TextOf = std::function<std::string_view(std::uint32_t name)>;

/// One collective, as this rank saw it.
struct Collective {
  Event call;  ///< Names, row (`source`), number and bytes.
  std::int64_t posted = 0;
  std::int64_t wait_began = 0;
  std::int64_t arrived = 0;
  std::int64_t wait_ended = 0;
  std::int64_t failed = 0;
  std::int64_t held_stream = -1;  ///< How long it has blocked the device's stream; -1: not measured.
  bool in_backward = false;       ///< Where the computation was when the wait began.
  bool posted_on_demand = false;  ///< No unit was entered between its post and its wait, and one was entered before, in this pass.
  Activity before;                ///< The activity of this rank for the longest time since its last call in the row.

  bool is_done() const { return wait_ended != 0 || failed != 0; }
  bool is_awaited() const { return wait_began != 0 && !is_done(); }
};

/// The computation was in one place: `unit`, or none.
struct ComputeSpan {
  std::int64_t began = 0;
  std::int64_t ended = 0;
  Activity::Kind kind = Activity::Kind::kUnknown;
  std::uint32_t unit = 0;
};

/// Bytes of each of kMemoryKinds.
using BytesByKind = std::array<std::int64_t, kMemoryKinds.size()>;

/// The memory that the engine holds from a moment on.
struct MemoryMoment {
  std::int64_t time = 0;
  BytesByKind held = {};
};

struct MemoryPeak {
  std::int64_t time = 0;  ///< When the computation left the unit.
  std::int64_t bytes = 0;
  std::uint32_t unit = 0;
};

struct StepSpan {
  std::int64_t number = 0;  ///< From 1, since the model was sharded; the same on all ranks.
  std::int64_t began = 0;
  std::int64_t ended = 0;           ///< When the next step began.
  bool is_whole = false;            ///< Its last backward has ended.
  std::int64_t sent_before = 0;     ///< Bytes that the rank had sent when the step began.
  std::int64_t read_before = 0;     ///< The part of them that peers had read from its memory.
  std::int64_t sent = -1;           ///< Bytes that the rank has sent in the step; -1: unknown, because no other step has begun since.
  std::int64_t read_by_peers = -1;  ///< The part of them that peers have read from its memory.
  std::int64_t peak = 0;            ///< Bytes of all kinds.
  std::uint32_t peak_unit = 0;
  BytesByKind peaks = {};  ///< Of each kind.
};

/// The history of one engine. The last step and the last span of `compute` have no end.
struct EngineReplay {
  std::vector<StepSpan> steps;
  std::vector<ComputeSpan> compute;  ///< Each begins when the one before it ends.
  std::vector<MemoryMoment> memory;  ///< From the first pass on whose beginning is kept.
  std::vector<MemoryPeak> peaks;     ///< Each higher than those before it in its step.

  /// Gives the last step and the last span this end.
  void end_at(std::int64_t time);
  std::vector<StepSpan> whole_steps() const;
  /// How long the computation was in this kind of place between two times.
  std::int64_t time_in(Activity::Kind kind, std::int64_t began, std::int64_t ended) const;
};

/// The first failure of a rank: a collective, or the exception that has ended it.
struct FirstFailure {
  std::int64_t time = 0;
  std::uint32_t text = 0;           ///< Of the error.
  std::optional<CollectiveKey> in;  ///< The collective, if it is one; its number is 0 if only the row is known.
};

struct RankReplay {
  /// Reads events, which may be in any order. `engine` is the source of the engine that counts most; 0: the one with the most steps.
  explicit RankReplay(std::vector<Event> events, const TextOf& text_of = events::text_of, std::uint32_t engine = 0);

  /// The number of the last call in a row; 0: there is none.
  std::uint64_t last_call(std::uint32_t row) const;
  /// Returns the collective of a row for which it waits; if there are several, the one for which it began to wait last. Null if there is
  /// none.
  const Collective* awaited(std::uint32_t row) const;

  std::map<CollectiveKey, Collective> collectives;  ///< Each as the engine sees it that has its unit.
  std::vector<EngineReplay> engines;                ///< At least one; the one that counts most comes first.
  std::vector<CollectiveKey> open_waits;            ///< The collectives for which it waits, in the order in which these waits began.
  Activity position;                                ///< Where its computation is, in any engine.
  std::optional<FirstFailure> first_failure;        ///< A failure after which it has not continued.
  std::optional<EndKind> end;
  std::uint32_t end_text = 0;  ///< The text of the exception, if one has ended it.
  std::int64_t last_event = 0;
  std::int64_t last_move = 0;  ///< When its computation moved last: into a unit, or to another pass; or when it made its last call.
};

}  // namespace fsdp::events
