// Gradients in 8 or 4 bits, from C++: which units send them, that results depend on nothing but the steps, and what is refused. The sums
// are compared with a reference in tests/cpp/comm/rounded_sum_test.cpp and tests/python/fsdp2/test_grad_comm_format.py.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

#include "engine/unit.h"
#include "fsdp/fsdp.h"
#include "support/messages.h"
#include "support/multi_rank.h"
#include "support/same_bits.h"
#include "support/stack.h"

namespace grad_comm_format_test {

using fsdp::DeviceMesh;
using fsdp::FullyShardOptions;
using fsdp::GradCommFormat;
using fsdp::testing::make_stack;
using fsdp::testing::run_ranks;
using fsdp::testing::stack_loss;
using fsdp::testing::stack_units;

const GradCommFormat kFourBits = {.bits = 4, .block = 32, .hadamard = true, .stochastic_rounding = true, .error_feedback = true};

DeviceMesh messages() { return fsdp::init_device_mesh("cpu", {{"dp_shard", -1}}, {.shared_memory = false}); }

struct Outcome {
  std::vector<at::Tensor> parameters;
  std::int64_t reduced_bytes = 0;  ///< Of the last step.
};

Outcome train(int rank, FullyShardOptions options) {
  auto model = make_stack();
  options.units = stack_units();
  if (!options.mesh.defined()) options.mesh = messages();
  auto sharded = fsdp::fully_shard(*model, options);
  fsdp::AdamW optimizer(*model, {.lr = 1e-2});
  for (int step = 0; step < 3; ++step) {
    sharded.reset_wire_stats();
    stack_loss(model, step, rank).backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  Outcome outcome{.parameters = {}, .reduced_bytes = sharded.wire_stats().reduce_scatter_bytes};
  for (const auto& [name, value] : sharded.full_parameters()) outcome.parameters.push_back(value.clone());
  return outcome;
}

bool are_same(const Outcome& a, const Outcome& b) {
  bool same = a.parameters.size() == b.parameters.size();
  for (std::size_t i = 0; same && i < a.parameters.size(); ++i) same = fsdp::testing::same_bits(a.parameters[i], b.parameters[i]);
  return same;
}

TEST(GradCommFormats, ResultsDependOnTheStepsAlone) {
  for (const int ranks : {2, 4}) {
    run_ranks(ranks, [](int rank) {
      const auto expected = train(rank, {.grad_comm_format = kFourBits});
      EXPECT_TRUE(are_same(expected, train(rank, {.grad_comm_format = kFourBits})));
      EXPECT_TRUE(are_same(expected, train(rank, {.placements = fsdp::Placements::optim(), .grad_comm_format = kFourBits})));
      EXPECT_TRUE(are_same(expected, train(rank, {.grad_comm_format = kFourBits, .separate_reduce_group = true})));
      const auto exact = train(rank, {});
      EXPECT_FALSE(are_same(expected, exact));
      for (std::size_t i = 0; i < exact.parameters.size(); ++i) {
        EXPECT_TRUE(at::allclose(expected.parameters[i], exact.parameters[i], 0, 0.05)) << i;  // Three updates of 0.01.
      }
    });
  }
}

// [Large parameters do not wait] Each parameter of the root is a part that is reduced by itself.
TEST(GradCommFormats, PartsOfAUnitAreRoundedAlike) {
  fsdp::engine::set_reduced_alone(0);
  run_ranks(2, [](int rank) {
    const auto expected = train(rank, {.grad_comm_format = kFourBits});
    EXPECT_TRUE(are_same(expected, train(rank, {.grad_comm_format = kFourBits})));
    // Replicated gradients are reduced together.
    EXPECT_TRUE(are_same(expected, train(rank, {.placements = fsdp::Placements::optim(), .grad_comm_format = kFourBits})));
  });
  fsdp::engine::set_reduced_alone(std::int64_t{8} << 20);
}

TEST(GradCommFormats, AUnitMayHaveItsOwn) {
  run_ranks(2, [](int rank) {
    const auto bytes = [&](const FullyShardOptions& options) { return train(rank, options).reduced_bytes; };
    const auto in_block = [](const GradCommFormat& format) {
      return [format](const std::string& name, const torch::nn::Module&) {
        return name == "blocks.1" ? fsdp::UnitSettings{.grad_comm_format = format} : fsdp::UnitSettings{};
      };
    };
    const auto exact = bytes({}), all = bytes({.grad_comm_format = GradCommFormat{}});
    const auto one = bytes({.unit_settings = in_block({})}),
               other = bytes({.grad_comm_format = GradCommFormat{}, .unit_settings = in_block({.bits = 4})});
    EXPECT_LT(all, exact * 2 / 5);  // Short blocks have scales, too.
    EXPECT_LT(one, exact);
    EXPECT_GT(one, all);
    EXPECT_LT(other, all);
  });
}

TEST(GradCommFormats, WhatIsRefused) {
  run_ranks(2, [](int rank) {
    const auto error = [&](const FullyShardOptions& options) { return fsdp::testing::message_of([&] { train(rank, options); }); };
    EXPECT_TRUE(fsdp::testing::has(error({.grad_comm_format = GradCommFormat{.bits = 16}}), "grad_comm_format: 16 bits"));
    const fsdp::MixedPrecisionPolicy in_double = {.grad_comm_dtype = at::kDouble};
    const auto text = error({.mixed_precision = in_double, .grad_comm_format = GradCommFormat{}});
    EXPECT_TRUE(fsdp::testing::has(text, "are sent in float64")) << text;
  });
}

// By a plan, which needs none. Hosts of two ranks send each other their sums.
TEST(GradCommFormats, GpusSendThem) {
  const auto reduced_bytes = [](std::int64_t ranks_per_host, const std::optional<GradCommFormat>& format) {
    auto model = make_stack();
    const FullyShardOptions options{.mesh = fsdp::planned_device_mesh("cuda", {{"dp_shard", 4}}, {.ranks_per_host = ranks_per_host}),
                                    .units = stack_units(),
                                    .grad_comm_format = format};
    return fsdp::plan(*model, options, {}).wire.reduce_scatter_bytes;
  };
  const auto exact = reduced_bytes(1, {});
  EXPECT_LT(reduced_bytes(1, GradCommFormat{}), exact * 2 / 5);
  // Two of the three shards that each rank sends go to its neighbour, and a third of the bytes are rounded.
  EXPECT_GT(reduced_bytes(2, GradCommFormat{}), exact * 2 / 3);
  EXPECT_LT(reduced_bytes(2, GradCommFormat{}), exact * 4 / 5);
}

}  // namespace grad_comm_format_test
