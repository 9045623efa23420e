#include "engine/tensor_bytes.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace fsdp::engine {
namespace tensor_bytes_test {

TEST(TensorBytes, CopiesSmallAndLargeTensors) {
  for (const std::int64_t rows : {0, 3, 300}) {
    const auto source = at::randn({rows, 1001});
    const auto target = at::zeros({rows, 1001});
    EXPECT_TRUE(copy_bytes(source, target));
    EXPECT_TRUE(at::equal(source, target));
  }
}

TEST(TensorBytes, LeavesWhatIsMoreThanBytesToOperators) {
  for (const std::int64_t rows : {3, 300}) {
    const auto square = at::randn({rows, rows});
    const auto target = at::zeros({rows, rows});
    EXPECT_FALSE(copy_bytes(square.t(), target));
    EXPECT_FALSE(copy_bytes(square.to(at::kDouble), target));
    EXPECT_FALSE(copy_bytes(at::randn({rows * rows}), target));
    EXPECT_FALSE(copy_bytes(square._neg_view(), target));
    EXPECT_TRUE(at::equal(target, at::zeros_like(target)));
  }
}

}  // namespace tensor_bytes_test
}  // namespace fsdp::engine
