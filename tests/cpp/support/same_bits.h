#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::testing {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// Both undefined, or of the same dtype, shape and bits.
inline bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() || !b.defined()) return a.defined() == b.defined();
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         (a.numel() == 0 || std::memcmp(a.contiguous().const_data_ptr(), b.contiguous().const_data_ptr(), a.nbytes()) == 0);
}

/// Of NamedTensors, or of maps from names to tensors.
template <typename Named>
void expect_same_bits(const Named& a, const Named& b) {
  ASSERT_EQ(a.size(), b.size());
  for (auto of_a = a.begin(), of_b = b.begin(); of_a != a.end(); ++of_a, ++of_b) {
    ASSERT_EQ(of_a->first, of_b->first);
    EXPECT_TRUE(same_bits(of_a->second, of_b->second)) << of_a->first;
  }
}

}  // namespace fsdp::testing
