#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace fsdp::events {

/// What happened. The comments say which of Event's fields have a meaning, beside `time`, `source` and `kind`.
enum class EventKind : std::uint8_t {
  // Of an engine, which is the source.
  kStepBegan,      ///< The first forward after the last backward of a step, or the first of all. `bytes`: what this rank has sent so far;
                   ///< `number`: the part of it that peers have read from its memory.
  kEntered,        ///< The computation is in `unit` from now on; `in_backward`.
  kBackwardBegan,  ///< The first entry or gradient of a backward.
  kBackwardEnded,  ///< A backward has ended. `number`: of the last one of a step, the step's number, from 1; of others, 0.
  kMemoryHeld,     ///< The engine holds `bytes` of one kind of memory, `number` of kMemoryKinds. It follows the four above: for each kind
                   ///< when a pass begins, and else for those of which there is more or less than before.
  kMemoryPeaked,   ///< While the computation was in `unit`, the engine held `bytes` of all kinds, more than before in this step.
  kKindPeaked,     ///< The most that the engine has held in this step of one kind of memory: `bytes` and `number` as of kMemoryHeld. It is
                   ///< told when the last backward ends, and once more before the next step, if it has become more.
  // Of one collective in a row, which is the source: `number`, `operation`, `unit`, `bytes` (of a shard; 0 if shards differ in size).
  kPosted,      ///< It is on its way: this rank has made the call.
  kWaitBegan,   ///< This rank needs the result.
  kArrived,     ///< What the others have sent is there; what is missing is this rank's own arithmetic. Not all transports tell.
  kWaitEnded,   ///< The result may be used. If the data move on a device, its stream waits, and the host went on.
  kFailed,      ///< Posting it, or waiting for it, has thrown.
  kHeldStream,  ///< Where the data move on a device: its stream has waited for them for `bytes` nanoseconds of the device's time. It is
                ///< told when the device has come so far, which may be long after kWaitEnded.
  // Of a row, which is the source.
  kGivenUp,  ///< After its first failure: `operation` is the text of the error.
  // Of the process; there is no source.
  kEnded,  ///< The first word on how it ends: `number` is an EndKind, `operation` the text of the exception, if there is one.
};

/// How a process ends.
enum class EndKind : std::uint8_t {
  kReturned,   ///< Its training function or its program has come to its end.
  kException,  ///< So it has, by an exception.
  kSignal,     ///< It was asked to: SIGTERM, Ctrl-C.
};

/// The kinds of the engine's memory. What is in host memory is none of them.
inline constexpr std::array<std::string_view, 6> kMemoryKinds = {"main parameters",     "main gradients", "gathered parameters",
                                                                 "unreduced gradients", "communication",  "optimizer state"};

/// A moment of a training run. The text of a name is text_of(), or that of the file of events. Files have these bytes: who changes them
/// changes EventWriter::kVersion.
struct Event {
  std::int64_t time = 0;        ///< In nanoseconds, of std::chrono::steady_clock; record() sets it.
  std::int64_t bytes = 0;       ///< See EventKind.
  std::uint64_t number = 0;     ///< Of a collective in its row, from 1, the same on all its ranks; otherwise see EventKind.
  std::uint32_t source = 0;     ///< Who tells it: an engine or a row, by the number that new_source() has given.
  std::uint32_t unit = 0;       ///< The name of a unit; of none: 0.
  std::uint32_t operation = 0;  ///< The name of a collective's operation, such as "all-gather".
  EventKind kind = EventKind::kStepBegan;
  bool in_backward = false;
  std::uint16_t unused = 0;
};

}  // namespace fsdp::events
