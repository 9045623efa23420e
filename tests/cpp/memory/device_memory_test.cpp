#include "memory/device_memory.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "support/logging_device.h"

namespace fsdp::memory {
namespace device_memory_test {

TEST(DeviceMemory, HostsNeedNotPinIt) {
  const testing::LoggingDevice device;
  EXPECT_TRUE(host_zeros(testing::LoggingDevice::device(), 64, HostMemoryKind::kPageable).device().is_cpu());
  EXPECT_TRUE(allocate_host(testing::LoggingDevice::device(), 64, HostMemoryKind::kPageable).device().is_cpu());
  EXPECT_ANY_THROW(host_zeros(testing::LoggingDevice::device(), 64)) << "this build has no device that memory could be pinned for";
}

}  // namespace device_memory_test
}  // namespace fsdp::memory
