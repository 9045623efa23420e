#include "engine/one_stream.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "support/logging_device.h"

namespace one_stream_test {

using fsdp::testing::LoggingDevice;

TEST(OneStream, OrdersAnotherStreamBehindTheFollowedOne) {
  const LoggingDevice device;
  fsdp::engine::OneStream stream(device.device());
  EXPECT_FALSE(stream.is_current()) << "none is followed yet";
  stream.follow();
  EXPECT_TRUE(stream.is_current());
  stream.follow();
  EXPECT_TRUE(device.take_events().empty()) << "the same stream orders itself";
  device.set_current_stream(7);
  EXPECT_FALSE(stream.is_current());
  stream.follow();
  EXPECT_TRUE(stream.is_current());
  EXPECT_EQ(device.take_events(), (std::vector<std::string>{"record on 0", "block 7"}));
  device.set_current_stream(0);
  stream.follow();
  EXPECT_EQ(device.take_events(), (std::vector<std::string>{"record on 7", "block 0"}));
}

TEST(OneStream, DoesNothingOnTheCpu) {
  fsdp::engine::OneStream stream{c10::Device(c10::DeviceType::CPU)};
  EXPECT_TRUE(stream.is_current());
  stream.follow();
  EXPECT_TRUE(stream.is_current());
}

}  // namespace one_stream_test
