// Which stream waits for which, on a device that exists in this test alone.

#include "engine/one_stream.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

namespace one_stream_test {

using c10::Device;
using c10::DeviceType;
using c10::Stream;

std::vector<std::string> events;
c10::StreamId current_stream = 0;

/// Streams with numbers, and events that write down what happens to them.
class LoggingGuard final : public c10::impl::DeviceGuardImplInterface {
 public:
  static constexpr DeviceType static_type = DeviceType::PrivateUse1;
  explicit LoggingGuard(DeviceType) {}
  DeviceType type() const override { return static_type; }
  Device exchangeDevice(Device) const override { return {static_type, 0}; }
  Device getDevice() const override { return {static_type, 0}; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device device) const noexcept override { return Stream(Stream::UNSAFE, device, current_stream); }
  Stream exchangeStream(Stream stream) const noexcept override {
    return Stream(Stream::UNSAFE, stream.device(), std::exchange(current_stream, stream.id()));
  }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    events.push_back("record on " + std::to_string(stream.id()));
  }
  void block(void*, const Stream& stream) const override { events.push_back("block " + std::to_string(stream.id())); }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
};

TEST(OneStream, OrdersAnotherStreamBehindTheFollowedOne) {
  static const c10::impl::DeviceGuardImplRegistrar registrar(DeviceType::PrivateUse1, new LoggingGuard(DeviceType::PrivateUse1));
  fsdp::engine::OneStream stream(Device(DeviceType::PrivateUse1, 0));
  EXPECT_FALSE(stream.is_current()) << "none is followed yet";
  stream.follow();
  EXPECT_TRUE(stream.is_current());
  stream.follow();
  EXPECT_TRUE(events.empty()) << "the same stream orders itself";
  current_stream = 7;
  EXPECT_FALSE(stream.is_current());
  stream.follow();
  EXPECT_TRUE(stream.is_current());
  EXPECT_EQ(events, (std::vector<std::string>{"record on 0", "block 7"}));
  events.clear();
  current_stream = 0;
  stream.follow();
  EXPECT_EQ(events, (std::vector<std::string>{"record on 7", "block 0"}));
}

TEST(OneStream, DoesNothingOnTheCpu) {
  fsdp::engine::OneStream stream{Device(DeviceType::CPU)};
  EXPECT_TRUE(stream.is_current());
  stream.follow();
  EXPECT_TRUE(stream.is_current());
}

}  // namespace one_stream_test
