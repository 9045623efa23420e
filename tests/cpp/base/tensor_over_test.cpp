#include "base/tensor_over.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>

#include "support/logging_device.h"

namespace fsdp {
namespace tensor_over_test {

TEST(TensorOver, HoldsItsMemory) {
  float values[] = {1, 2, 3};
  const auto held = std::make_shared<int>(0);
  auto tensor = tensor_over(values, {3}, at::kFloat, [held](void*) {});
  EXPECT_EQ(tensor.const_data_ptr(), values);
  EXPECT_EQ(held.use_count(), 2);
  tensor = at::Tensor();
  EXPECT_EQ(held.use_count(), 1);
}

// A rank whose shard is empty has no memory, and torch would ask the device's driver whose it is.
TEST(TensorOver, AnEmptyOneMayLieNowhere) {
  const testing::LoggingDevice device;
  const auto options = at::TensorOptions().dtype(at::kFloat).device(testing::LoggingDevice::device());
  const auto tensor = tensor_over(nullptr, {0, 4}, options, [](void*) {});
  EXPECT_EQ(tensor.device(), testing::LoggingDevice::device());
  EXPECT_EQ(tensor.sizes(), (at::IntArrayRef{0, 4}));
}

}  // namespace tensor_over_test
}  // namespace fsdp
