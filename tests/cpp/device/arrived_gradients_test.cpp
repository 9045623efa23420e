#include "engine/arrived_gradients.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <utility>
#include <vector>

#include "support/on_device.h"

// Which gradients a reduction takes as they are.
namespace arrived_gradients_test {

using fsdp::engine::ArrivedGradients;
using fsdp::engine::Buffer;
using fsdp::engine::Part;

constexpr std::int64_t kRows = 4;
constexpr std::int64_t kColumns = 5;
constexpr std::int64_t kNumel = kRows * kColumns;

/// Parameters that are cut by rows for two ranks, each in a sub-buffer of its own, as of hooked units. One rank's rows of the last are
/// padded.
fsdp::layout::UnitLayout layout() {
  std::vector<fsdp::layout::ParameterTraits> parameters;
  for (const std::int64_t rows : {kRows, kRows, kRows - 1}) {
    parameters.push_back({.name = "p",
                          .shape = {rows, kColumns},
                          .dtype = static_cast<std::int32_t>(parameters.size()),
                          .itemsize = 4,
                          .trainable = true,
                          .granularity = fsdp::Granularity::rows()});
  }
  return {std::move(parameters), 2};
}

class ArrivedGradientsTest : public ::testing::Test {
 protected:
  ArrivedGradientsTest() {
    const auto memory = at::zeros({4096}, at::TensorOptions().dtype(at::kByte).device(sim::device()));
    lay_out(buffer, memory.storage(), 3, [](std::size_t) { return Part{at::kFloat, kNumel}; });
  }

  at::Tensor place(std::size_t k) const { return buffer.parts[k].narrow(0, 0, of(k).numel()).view(of(k).sizes()); }
  static at::Tensor of(std::size_t k) {
    const auto options = at::TensorOptions().device(sim::device());
    return at::full({k == 2 ? kRows - 1 : kRows, kColumns}, static_cast<double>(k + 1), options);
  }
  void add(std::size_t k, at::Tensor gradient) { arrived.add(k, place(k), gradient); }
  bool settle(bool may_lend = true) { return arrived.settle(unit, buffer, may_lend); }
  void expect_copied(std::size_t k) const {
    EXPECT_FALSE(arrived.lent(k).defined()) << k;
    EXPECT_TRUE(at::equal(place(k).cpu(), of(k).cpu())) << k;
  }

  const fsdp::layout::UnitLayout unit = layout();
  Buffer buffer;
  ArrivedGradients arrived;
};

TEST_F(ArrivedGradientsTest, WholeOnesAreLent) {
  auto gradient = of(0);
  const auto* const data = gradient.const_data_ptr();
  add(0, std::exchange(gradient, {}));
  add(1, of(1));
  sim::reset_stats();
  EXPECT_FALSE(settle()) << "of the third parameter there is no gradient";
  EXPECT_EQ(sim::stats().all_kernels(), 0);
  EXPECT_EQ(arrived.lent(0).const_data_ptr(), data);
  EXPECT_EQ(arrived.lent(0).sizes(), at::IntArrayRef({kNumel}));
  EXPECT_TRUE(arrived.lent(1).defined());
  arrived.clear();
  EXPECT_FALSE(arrived.lent(0).defined());
}

TEST_F(ArrivedGradientsTest, TheBufferIsFreeWhereAllAreLent) {
  add(0, of(0));
  add(1, of(1));
  auto padded = at::full({kRows, kColumns}, 3.0, at::TensorOptions().device(sim::device()));
  arrived.add(2, buffer.parts[2].view({kRows, kColumns}), std::exchange(padded, {}));
  EXPECT_TRUE(settle());
}

TEST_F(ArrivedGradientsTest, OthersAreCopiedTogether) {
  const auto shared = of(0);
  add(0, shared.view({kRows, kColumns}));  // Another tensor over memory that somebody has.
  add(1, of(1).t().contiguous().t());
  add(2, of(2));
  sim::reset_stats();
  EXPECT_FALSE(settle());
  EXPECT_LE(sim::stats().all_kernels(), 3);
  for (const std::size_t k : {0, 1, 2}) expect_copied(k);
}

TEST_F(ArrivedGradientsTest, WhatSomebodyHoldsIsCopied) {
  const auto held = of(0);
  add(0, held);
  add(1, of(1).to(at::kDouble));
  EXPECT_FALSE(settle());
  expect_copied(0);
  expect_copied(1);
}

TEST_F(ArrivedGradientsTest, NothingIsLentWhereItMayNot) {
  add(0, of(0));
  EXPECT_FALSE(settle(/*may_lend=*/false));
  expect_copied(0);
}

}  // namespace arrived_gradients_test
