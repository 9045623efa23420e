#pragma once

#include <c10/core/Stream.h>

#include <cstdint>
#include <string>

// Captures of graphs: see Graph in device.h.
namespace sim {

/// A capture's number; 0: of none.
using CaptureId = std::uint64_t;

CaptureId begin_capture_on(c10::Stream stream);
void end_capture_on(c10::Stream stream);
/// That the stream takes part in.
CaptureId capture_of(c10::Stream stream);
/// The stream waits for what was put on a stream of this capture. So it takes part from now on.
void wait_within_capture(c10::Stream stream, CaptureId waited_for);
/// The host waits for the device.
void wait_beside_captures(int device, const std::string& reason);
/// Memory is allocated for the stream, on the device of captures or another.
void allocate_beside_captures(c10::Stream stream);
/// The host asks for the end of what is of this capture, or waits for it.
void ask_of_capture(CaptureId capture);

}  // namespace sim
