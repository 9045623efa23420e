#include "capture.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "device.h"
#include "host_clock.h"
#include "streams.h"

namespace sim {
namespace {

struct Captures {
  CaptureId last = 0;
  std::map<std::size_t, std::pair<CaptureId, c10::Stream>> streams;  // that take part, by agent
};

/// Under the lock.
Captures& captures() {
  static auto* const made = new Captures;
  return *made;
}

bool is_under_way(CaptureId capture) {
  const auto& streams = captures().streams;
  return std::any_of(streams.begin(), streams.end(), [&](const auto& one) { return one.second.first == capture; });
}

bool any_on(int device) {
  const auto& streams = captures().streams;
  return std::any_of(streams.begin(), streams.end(), [&](const auto& one) { return one.second.second.device_index() == device; });
}

std::string name_of(c10::Stream stream) { return stream.id() == 0 ? "the default stream" : "stream " + std::to_string(agent_of(stream)); }

}  // namespace

CaptureId begin_capture_on(c10::Stream stream) {
  const Lock lock;
  TORCH_CHECK(stream.id() != 0, "sim: the default stream cannot be captured");
  TORCH_CHECK(capture_of(stream) == 0, "sim: the stream is being captured");
  captures().streams.insert_or_assign(agent_of(stream), std::pair(++captures().last, stream));
  return captures().last;
}

void end_capture_on(c10::Stream stream) {
  const Lock lock;
  const CaptureId ended = capture_of(stream);
  TORCH_CHECK(ended != 0, "sim: the stream is not being captured");
  const Clock end = clock_of(stream);
  std::erase_if(captures().streams, [&](const auto& one) {
    const auto& [capture, other] = one.second;
    if (capture == ended && !end.knows(clock_of(other))) {
      report("capture: it ends on " + name_of(stream) + ", which is not behind " + name_of(other));
    }
    return capture == ended;
  });
  host_finds(end);
}

CaptureId capture_of(c10::Stream stream) {
  const Lock lock;
  const auto found = captures().streams.find(agent_of(stream));
  return found == captures().streams.end() ? 0 : found->second.first;
}

void wait_within_capture(c10::Stream stream, CaptureId waited_for) {
  const Lock lock;
  const CaptureId own = capture_of(stream);
  if (own == waited_for) return;
  if (waited_for != 0 && !is_under_way(waited_for)) {
    report("capture: " + name_of(stream) + " waits for what a graph recorded whose capture has ended");
  } else if (own != 0) {
    report("capture: " + name_of(stream) + " is captured, and waits for what was recorded outside of its capture");
  } else if (stream.id() == 0) {
    report("capture: the default stream waits for what a graph records, and cannot take part");
  } else {
    captures().streams.insert_or_assign(agent_of(stream), std::pair(waited_for, stream));
  }
}

void wait_beside_captures(int device, const std::string& reason) {
  const Lock lock;
  if (any_on(device)) {
    report("capture: the host waits (" + reason + ") while a graph is captured");
  }
}

void allocate_beside_captures(c10::Stream stream) {
  const Lock lock;
  if (capture_of(stream) == 0 && any_on(stream.device_index())) {
    report("capture: memory is allocated for " + name_of(stream) + ", which is not captured, while a graph is");
  }
}

void ask_of_capture(CaptureId capture) {
  const Lock lock;
  if (capture != 0) report("capture: the host asks for the end of what a graph records");
}

}  // namespace sim
