#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace fsdp::events {

/// The kind of an event. The comments list which of Event's fields have a meaning, beside `time`, `source` and `kind`.
enum class EventKind : std::uint8_t {
  // Events of an engine, which is the source.
  kStepBegan,      ///< The first forward after the last backward of a step, or the first of all. `bytes`: what this rank has sent so far;
                   ///< `number`: the part of it that peers have read from its memory.
  kEntered,        ///< The computation is in `unit` from now on; `in_backward`.
  kBackwardBegan,  ///< The first entry or gradient of a backward.
  kBackwardEnded,  ///< A backward has ended. `number`: the step's number, from 1, if it was the last one of a step; otherwise 0.
  kMemoryHeld,  ///< The engine holds `bytes` of one kind of memory, `number` of kMemoryKinds. It follows the four above: for each kind when
                ///< a pass begins, and otherwise for the kinds that have changed.
  kMemoryPeaked,  ///< While the computation was in `unit`, the engine held `bytes` of all kinds, more than before in this step.
  kKindPeaked,    ///< The most that the engine has held in this step of one kind of memory: `bytes` and `number` as of kMemoryHeld. It is
                  ///< recorded when the last backward ends, and again before the next step if it has grown.
  // Events of one collective in a row, which is the source: `number`, `operation`, `unit`, `bytes` (of a shard; 0 if shards differ in
  // size).
  kPosted,      ///< This rank has called it.
  kWaitBegan,   ///< This rank needs the result.
  kArrived,     ///< The data of the others have arrived; only this rank's own arithmetic is left. Not all transports record it.
  kWaitEnded,   ///< The result may be used. If the data move on a device, its stream waits, and the host has continued.
  kFailed,      ///< Posting it, or waiting for it, has thrown.
  kHeldStream,  ///< If the data move on a device: its stream has waited for them for `bytes` nanoseconds of the device's time. It is
                ///< recorded after the device has passed the wait, which may be long after kWaitEnded.
  // Events of a row, which is the source.
  kGivenUp,  ///< After its first failure: `operation` is the text of the error.
  // Events of the process; there is no source.
  kEnded,  ///< The first recorded reason for the end: `number` is an EndKind, `operation` the text of the exception, if there is one.
};

/// How a process ends.
enum class EndKind : std::uint8_t {
  kReturned,   ///< Its training function or its program has returned.
  kException,  ///< An exception has ended it.
  kSignal,     ///< A signal has ended it: SIGTERM, Ctrl-C.
};

/// The kinds of the engine's memory, without host memory.
inline constexpr std::array<std::string_view, 6> kMemoryKinds = {"main parameters",     "main gradients", "gathered parameters",
                                                                 "unreduced gradients", "communication",  "optimizer state"};

/// A moment of a training run. The text of a name is text_of(), or that in the file of events. Files contain these bytes: a change of them
/// requires a new EventWriter::kVersion.
struct Event {
  std::int64_t time = 0;        ///< In nanoseconds, of std::chrono::steady_clock; record() sets it.
  std::int64_t bytes = 0;       ///< See EventKind.
  std::uint64_t number = 0;     ///< The number of a collective in its row, from 1, the same on all its ranks; otherwise see EventKind.
  std::uint32_t source = 0;     ///< The engine or the row that recorded it: the number from new_source().
  std::uint32_t unit = 0;       ///< The name of a unit; 0: none.
  std::uint32_t operation = 0;  ///< The name of a collective's operation, such as "all-gather".
  EventKind kind = EventKind::kStepBegan;
  bool in_backward = false;
  std::uint16_t unused = 0;
};

}  // namespace fsdp::events
