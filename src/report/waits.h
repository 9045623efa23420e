#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "events/event.h"
#include "events/event_ring.h"
#include "events/whereabouts.h"
#include "fsdp/wait_reason.h"

// What the events of one process say about its collectives. No communication, no engine.
namespace fsdp::report {

/// A row and a number in it.
using CollectiveKey = std::pair<std::uint32_t, std::uint64_t>;

/// What a rank did in some time: the computation was in `unit`, and went to `next` at its end, if that is not 0.
struct Activity {
  enum class Kind : std::uint8_t { kUnknown, kForward, kBackward, kBetweenSteps, kWaiting };  // The first four as in Whereabouts::Pass.
  Kind kind = Kind::kUnknown;
  std::uint32_t unit = 0;  ///< A name; of kWaiting: that of the collective.
  std::uint32_t next = 0;
  CollectiveKey awaited = {};  ///< Of kWaiting.
};
constexpr Activity::Kind kind_of(events::Whereabouts::Pass pass) { return static_cast<Activity::Kind>(pass); }
/// "in forward of 'blocks.2', before 'blocks.3'". Names may be empty.
std::string activity_text(Activity::Kind kind, const std::string& unit, const std::string& next);

/// Tells the text of a name in events.
using TextOf = std::function<std::string_view(std::uint32_t)>;

/// One collective as this rank took part in it. Times are in ns; 0: there is no such event.
struct Collective {
  events::Event call;  ///< Names, row (`source`), number and bytes.
  std::int64_t posted = 0;
  std::int64_t wait_began = 0;
  std::int64_t arrived = 0;
  std::int64_t wait_ended = 0;
  std::int64_t failed = 0;
  std::int64_t held_stream = -1;  ///< How long it has held the device's stream; -1: not measured.
  bool in_backward = false;       ///< Where the computation was when the wait began.
  bool posted_on_demand = false;  ///< No unit was entered between its post and its wait, and one was entered before, in this pass.
  Activity before;                ///< What this rank did for the longest time since its last call in the row.

  bool is_done() const { return wait_ended != 0 || failed != 0; }
  bool is_awaited() const { return wait_began != 0 && !is_done(); }
};

/// All collectives of which there are events. `engine` is the source of the events that say where the computation is. Names are those of
/// this process, unless `text_of` says what others are.
std::map<CollectiveKey, Collective> collectives_of(std::span<const events::Event> events, std::uint32_t engine,
                                                   const TextOf& text_of = events::text_of);

/// How much of the wait is for the last of the other ranks of the row to make the call. `last_call`, here and below: when that one did so,
/// in this rank's clock; 0 if it is not known.
std::int64_t late_part(const Collective& collective, std::int64_t last_call);
/// Whether that is most of it: the wait's cause is then what kept that rank.
bool is_for_peer(const Collective& collective, std::int64_t last_call);

/// Divides the wait for a collective among the reasons, in ns. `queued_bytes`: see queued_bytes().
std::array<std::int64_t, kWaitReasons> reasons_of(const Collective& collective, std::int64_t last_call, std::int64_t queued_bytes);

/// The bytes of the collectives that this rank had called before, and that were under way when all ranks had made this call.
std::int64_t queued_bytes(const Collective& collective, std::int64_t last_call, const std::map<CollectiveKey, Collective>& all);

/// One step of an engine. Times are in ns.
struct StepRecord {
  std::int64_t began = 0;
  std::int64_t ended = 0;    ///< When the next one began; of the last one: the `now` of steps_of().
  std::int64_t forward = 0;  ///< How long, here and below.
  std::int64_t backward = 0;
  std::int64_t between = 0;
  std::int64_t sent = 0;           ///< Bytes that this rank had sent when the step began.
  std::int64_t read_by_peers = 0;  ///< The part of them that peers had read from its memory.
  std::int64_t peak = 0;           ///< Bytes.
  std::uint32_t peak_unit = 0;     ///< A name.
};
/// The steps whose last backward has ended, the oldest first.
std::vector<StepRecord> steps_of(std::span<const events::Event> events, std::uint32_t engine, std::int64_t now);

}  // namespace fsdp::report
