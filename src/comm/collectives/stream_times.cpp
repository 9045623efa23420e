#include "comm/collectives/stream_times.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

#include "base/stream_capture.h"
#include "events/event_ring.h"

namespace fsdp::comm {
namespace {

/// They are requested long before, or never again.
constexpr std::size_t kMostWaits = 2048;

}  // namespace

void StreamTimes::measure(c10::Device device, const events::Event& call, const std::function<void()>& wait) {
  if (device.is_cpu() || !events::measures_streams()) return wait();
  const auto stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  if (is_capturing(stream)) return wait();
  // BACKEND_DEFAULT: events that keep times, where torch's own do not.
  Wait measured{
      .call = call, .began = {device.type(), c10::EventFlag::BACKEND_DEFAULT}, .ended = {device.type(), c10::EventFlag::BACKEND_DEFAULT}};
  measured.began.record(stream);
  wait();
  measured.ended.record(stream);
  waits_.push_back(std::move(measured));
  if (waits_.size() <= kMostWaits) return;
  note();
  if (waits_.size() > kMostWaits) waits_.pop_front();
}

bool StreamTimes::note() noexcept {
  constexpr double kNanosecondsPerMillisecond = 1e6;
  bool any = false;
  try {
    while (!waits_.empty()) {
      auto& [call, began, ended] = waits_.front();
      const bool has_begun = began.query();
      if (!ended.query() || !has_begun) break;
      call.kind = events::EventKind::kHeldStream;
      call.bytes = static_cast<std::int64_t>(began.elapsedTime(ended) * kNanosecondsPerMillisecond);
      events::record(call);
      waits_.pop_front();
      any = true;
    }
  } catch (...) {  // The device has failed: its next use throws.
    waits_.clear();
  }
  return any;
}

}  // namespace fsdp::comm
