#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <deque>
#include <functional>

#include "events/event.h"

namespace fsdp::comm {

/// Measures how long waits block a device's stream, by the device's clock: each wait lies between two events of the stream, and the time
/// between them becomes an event of this process (kHeldStream) when it is requested and the device has passed both. The host never waits
/// for that. Only the last waits are kept.
///
/// Recording an event takes the host a microsecond or two, so it is done only if the result is used (events::measure_streams()). Not
/// thread-safe.
class StreamTimes {
 public:
  /// Calls `wait`, which makes the device's current stream wait. `call` is the event of the collective that is waited for; its kind, time
  /// and bytes do not matter. On the CPU, and while a graph is captured, nothing is measured.
  void measure(c10::Device device, const events::Event& call, const std::function<void()>& wait);
  /// Records the events of waits that the device has passed. Returns true if there were any.
  bool note() noexcept;

 private:
  struct Wait {
    events::Event call;
    c10::Event began;
    c10::Event ended;
  };

  std::deque<Wait> waits_;  ///< Of which the device has not passed all, in their order.
};

}  // namespace fsdp::comm
