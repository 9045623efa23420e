#pragma once

#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <span>

#include "access_map.h"
#include "capture.h"

// What graphs record: see Graph in device.h.
namespace sim {

/// A kernel or collective of a stream that is captured uses these ranges.
void note_in_graph(c10::Stream stream, std::span<const Range> ranges);
/// What it does, at each replay again. Nothing where the stream is not captured.
void record_in_graph(c10::Stream stream, std::function<void()> node);
/// At the end of each replay.
void record_at_end_of_graph(c10::Stream stream, std::function<void()> node);

}  // namespace sim
