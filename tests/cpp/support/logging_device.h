#pragma once

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

// A device that exists in tests alone: it shows which stream waits for which.
namespace fsdp::testing {

/// Streams with numbers, and events that write down what happens to them. One at a time, in one thread. The process has the device only as
/// long as this exists: a backward starts a thread for each device, and a process with threads can't fork ranks.
class LoggingDevice {
 public:
  LoggingDevice() {
    static const Guard guard(Guard::static_type);
    registered().store(&guard);
    state() = {};
  }
  ~LoggingDevice() { registered().store(nullptr); }
  LoggingDevice(const LoggingDevice&) = delete;
  LoggingDevice& operator=(const LoggingDevice&) = delete;

  static c10::Device device() { return {Guard::static_type, 0}; }
  static void set_current_stream(c10::StreamId stream) { state().current = stream; }
  /// Since the last call.
  static std::vector<std::string> take_events() { return std::exchange(state().events, {}); }

 private:
  struct State {
    std::vector<std::string> events;
    c10::StreamId current = 0;
    c10::StreamId next = 100;  // of the pool
    int guards = 0;            // of the device
  };
  static State& state() {
    static State state;
    return state;
  }
  static std::atomic<const c10::impl::DeviceGuardImplInterface*>& registered() {
    return c10::impl::device_guard_impl_registry.at(static_cast<std::size_t>(Guard::static_type));
  }

  class Guard final : public c10::impl::DeviceGuardImplInterface {
   public:
    static constexpr c10::DeviceType static_type = c10::DeviceType::PrivateUse1;
    explicit Guard(c10::DeviceType) {}
    c10::DeviceType type() const override { return static_type; }
    c10::Device exchangeDevice(c10::Device) const override {
      ++state().guards;
      return device();
    }
    c10::Device getDevice() const override { return device(); }
    void setDevice(c10::Device) const override {}
    void uncheckedSetDevice(c10::Device) const noexcept override { --state().guards; }
    c10::Stream getStream(c10::Device device) const noexcept override { return c10::Stream(c10::Stream::UNSAFE, device, state().current); }
    c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
      const c10::StreamId id = state().next++;
      state().events.push_back("pool gives " + std::to_string(id));
      return c10::Stream(c10::Stream::UNSAFE, device, id);
    }
    c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
      return c10::Stream(c10::Stream::UNSAFE, stream.device(), std::exchange(state().current, stream.id()));
    }
    c10::DeviceIndex deviceCount() const noexcept override { return 1; }
    void record(void**, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
      state().events.push_back("record on " + std::to_string(stream.id()));
    }
    void block(void*, const c10::Stream& stream) const override { state().events.push_back("block " + std::to_string(stream.id())); }
    void synchronizeEvent(void*) const override {
      state().events.emplace_back(state().guards > 0 ? "the host waits under a guard" : "the host waits");
    }
    void synchronizeStream(const c10::Stream&) const override {}
    void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream& stream) const override {
      state().events.push_back("memory on " + std::to_string(stream.id()));
    }
    void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
  };
};

}  // namespace fsdp::testing
