// A backward that ends in an exception leaves no gradient, wherever the engine had put what it had got so far.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "fsdp/fsdp.h"
#include "support/meshes.h"
#include "support/messages.h"
#include "support/multi_rank.h"
#include "support/same_bits.h"
#include "support/stack.h"

namespace failed_backward_test {

using fsdp::FullyShardOptions;
using fsdp::Placements;
using fsdp::testing::expect_same_bits;
using fsdp::testing::has;
using fsdp::testing::line;
using fsdp::testing::make_stack;
using fsdp::testing::message_of;
using fsdp::testing::NamedTensors;
using fsdp::testing::plane;
using fsdp::testing::run_ranks;
using fsdp::testing::Stack;
using fsdp::testing::stack_input;
using fsdp::testing::stack_units;

struct Variant {
  std::string name;
  FullyShardOptions options;
  bool is_last_backward = true;
};

std::vector<Variant> variants(int ranks) {
  std::vector<Variant> all;
  for (const auto& strategy : {"no_shard", "optim", "optim_grads", "optim_grads_params"}) {
    const auto placements = Placements::from_name(strategy);
    all.push_back({.name = strategy, .options = {.mesh = line(), .placements = placements}});
    if (ranks == 4) all.push_back({.name = std::string(strategy) + ", HSDP", .options = {.mesh = plane(), .placements = placements}});
  }
  const fsdp::MixedPrecisionPolicy bf16{.param_dtype = at::kBFloat16, .grad_comm_dtype = at::kBFloat16};
  all.push_back({.name = "bf16", .options = {.mesh = line(), .mixed_precision = bf16}});
  all.push_back({.name = "offload", .options = {.mesh = line(), .offload = fsdp::Offload::kAll}});
  all.push_back({.name = "offload, bf16", .options = {.mesh = line(), .mixed_precision = bf16, .offload = fsdp::Offload::kAll}});
  if (ranks == 4) all.push_back({.name = "HFSDP", .options = {.mesh = plane(), .outer_placements = Placements::optim()}});
  all.push_back({.name = "not the last backward", .options = {.mesh = line()}, .is_last_backward = false});
  return all;
}

at::Tensor forward_loss(Stack& model, std::int64_t step, std::int64_t rank) {
  return fsdp::forward(model, stack_input(step, rank), std::vector<std::size_t>{}).square().mean();
}

void fail_in_backward(Stack& model, const std::string& block, std::int64_t step, std::int64_t rank) {
  model->observer = [&](const std::string& event) {
    if (event == "backward " + block) throw std::runtime_error("thrown at " + event);
  };
  const auto message = message_of<std::runtime_error>([&] { forward_loss(model, step, rank).backward(); });
  EXPECT_TRUE(has(message, "thrown at backward " + block)) << message;
  model->observer = {};
}

class FailedBackward : public ::testing::TestWithParam<int> {};

// Blocks 3 and 2 are reduced, block 1's reduction is under way, when block 0's backward throws. Nobody calls zero_grad.
TEST_P(FailedBackward, LeavesNoGradient) {
  run_ranks(GetParam(), [](int rank) {
    for (const auto& variant : variants(GetParam())) {
      SCOPED_TRACE(variant.name);
      const auto gradients = [&](const std::function<void(Stack&, fsdp::FSDPModule&)>& before) {
        auto model = make_stack();
        auto options = variant.options;
        options.units = stack_units();
        auto sharded = fsdp::fully_shard(*model, options);
        sharded.set_is_last_backward(variant.is_last_backward);
        before(model, sharded);
        forward_loss(model, 1, rank).backward();
        return sharded.full_gradients();
      };
      const auto expected = gradients([](Stack&, fsdp::FSDPModule&) {});
      for (const auto* block : {"blocks.0", "blocks.2"}) {
        for (const bool resets : {true, false}) {
          expect_same_bits(gradients([&](Stack& model, fsdp::FSDPModule& sharded) {
                             fail_in_backward(model, block, 50, rank);
                             if (!resets) return;
                             sharded.reset();
                             const auto stats = sharded.memory_stats();
                             EXPECT_EQ(stats.main_gradients.live, 0);
                             EXPECT_EQ(stats.unreduced_gradients.live, 0);
                             EXPECT_EQ(stats.communication.live, 0);
                             for (const auto& [name, gradient] : sharded.full_gradients()) EXPECT_FALSE(gradient.defined()) << name;
                           }),
                           expected);
        }
      }
    }
  });
}

// A forward without a backward is enough.
TEST_P(FailedBackward, EndsWhenTheNextForwardBegins) {
  run_ranks(GetParam(), [](int rank) {
    auto model = make_stack();
    auto sharded = fsdp::fully_shard(*model, {.mesh = line(), .units = stack_units()});
    forward_loss(model, 0, rank).backward();
    sharded.zero_grad();
    fail_in_backward(model, "blocks.2", 1, rank);
    const auto failed = sharded.memory_stats();
    EXPECT_GT(failed.unreduced_gradients.live + failed.main_gradients.live, 0);
    const torch::NoGradGuard no_grad;
    forward_loss(model, 2, rank);
    EXPECT_EQ(sharded.memory_stats().unreduced_gradients.live, 0);
    EXPECT_EQ(sharded.memory_stats().main_gradients.live, 0);
  });
}

// What earlier backwards gave goes with it, since the two have been added; a warning says so.
TEST_P(FailedBackward, DropsWhatItWasAddedTo) {
  run_ranks(GetParam(), [](int rank) {
    for (const auto& variant : variants(GetParam())) {
      for (const bool sync : {true, false}) {
        SCOPED_TRACE(variant.name + (sync ? "" : ", without synchronization"));
        auto model = make_stack();
        auto options = variant.options;
        options.units = stack_units();
        auto sharded = fsdp::fully_shard(*model, options);
        forward_loss(model, 1, rank).backward();
        const auto expected = sharded.full_gradients();
        sharded.zero_grad();
        sharded.set_requires_gradient_sync(sync);
        forward_loss(model, 2, rank).backward();
        ::testing::internal::CaptureStderr();
        fail_in_backward(model, "blocks.0", 50, rank);
        sharded.reset();
        const auto warning = ::testing::internal::GetCapturedStderr();
        EXPECT_TRUE(has(warning, "the gradients of earlier backwards to which it was adding are dropped with it")) << warning;
        sharded.set_requires_gradient_sync(true);
        forward_loss(model, 1, rank).backward();
        expect_same_bits(sharded.full_gradients(), expected);
      }
    }
  });
}

TEST_P(FailedBackward, ZeroGradWithinABackwardIsRefused) {
  run_ranks(GetParam(), [](int rank) {
    for (const auto& variant : variants(GetParam())) {
      SCOPED_TRACE(variant.name);
      auto model = make_stack();
      auto options = variant.options;
      options.units = stack_units();
      auto sharded = fsdp::fully_shard(*model, options);
      forward_loss(model, 1, rank).backward();
      const auto expected = sharded.full_gradients();
      model->observer = [&](const std::string& event) {
        if (event == "backward blocks.1") sharded.zero_grad();
      };
      const auto message = message_of<fsdp::Error>([&] { forward_loss(model, 2, rank).backward(); });
      EXPECT_TRUE(has(message, "zero_grad() inside of a backward")) << message;
      model->observer = {};
      sharded.zero_grad();
      forward_loss(model, 1, rank).backward();
      expect_same_bits(sharded.full_gradients(), expected);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, FailedBackward, ::testing::Values(1, 2, 4), [](const auto& info) { return std::to_string(info.param); });

}  // namespace failed_backward_test
