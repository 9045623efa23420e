#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/version.h>

#include <utility>

#include "host_clock.h"
#include "memory.h"
#include "streams.h"

namespace sim {
namespace {

struct Event {
  int device = 0;
  Point point;
  bool was_asked = false;  ///< Whether it is over.
};

Event* event_of(void* event) { return static_cast<Event*>(event); }

/// Streams and events, as torch asks for them.
class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  static constexpr c10::DeviceType static_type = kType;

  c10::DeviceType type() const override { return kType; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Device getDevice() const override { return device(current_device()); }
  c10::Device exchangeDevice(c10::Device to) const override { return device(exchange_device(index_of(to))); }
  void setDevice(c10::Device to) const override { exchange_device(index_of(to)); }
  void uncheckedSetDevice(c10::Device to) const noexcept override { exchange_device(index_of(to)); }

  c10::Stream getStream(c10::Device of) const noexcept override { return current_stream(index_of(of)); }
  c10::Stream getDefaultStream(c10::Device of) const override { return default_stream(index_of(of)); }
  // Never the same one twice, so that nothing is ordered by chance.
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool) const override { return new_stream(index_of(of)); }
  c10::Stream getNewStream(c10::Device of, int) const override { return new_stream(index_of(of)); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return exchange_current_stream(stream); }
  bool queryStream(const c10::Stream& stream) const override {
    ask_of_capture(capture_of(stream));
    host_finds(clock_of(stream));
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    host_waits(stream.device_index(), clock_of(stream), "stream.synchronize");
  }
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
  bool isStreamCapturing(const c10::Stream& stream) const override { return capture_of(stream) != 0; }
#endif
  void synchronizeDevice(c10::DeviceIndex index) const override { synchronize(index); }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    allocator().recordStream(memory, stream);
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    *event_of(*event) = {.device = stream.device_index(), .point = point_of(stream)};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) stream_waits(stream, event_of(event)->point);
  }
  // As late as it may be: the first answer is no.
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    ask_of_capture(event_of(event)->point.capture);
    if (!std::exchange(event_of(event)->was_asked, true)) return false;
    host_finds(event_of(event)->point.clock);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    ask_of_capture(event_of(event)->point.capture);
    host_waits(event_of(event)->device, event_of(event)->point.clock, "event.synchronize");
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete event_of(event); }
  double elapsedTime(void* from, void* to, c10::DeviceIndex) const override {
    constexpr double kNanosecondsPerMillisecond = 1e6;
    const auto time = [](void* event) { return static_cast<double>(event_of(event)->point.clock.time()); };
    return (time(to) - time(from)) / kNanosecondsPerMillisecond;
  }
};

const c10::impl::DeviceGuardImplRegistrar registrar(kType, new Guard);

}  // namespace
}  // namespace sim
