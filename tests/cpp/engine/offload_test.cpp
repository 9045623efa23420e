// What lies in host memory: every optimizer's updates are the same bits, the device holds what it should, writes reach the host. (Losses,
// gradients and parameters of every strategy: matrix_test.cpp.)

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "fsdp/error.h"
#include "support/make_optimizer.h"
#include "support/multi_rank.h"
#include "support/same_bits.h"
#include "support/stack.h"

namespace offload_test {

using fsdp::FullyShardOptions;
using fsdp::Offload;
using fsdp::testing::expect_same_bits;
using fsdp::testing::line;
using fsdp::testing::make;
using fsdp::testing::make_stack;
using fsdp::testing::MakeOptimizer;
using fsdp::testing::NamedTensors;
using fsdp::testing::run_ranks;
using fsdp::testing::Stack;
using fsdp::testing::stack_loss;
using fsdp::testing::stack_units;

struct Trained {
  NamedTensors parameters;
  fsdp::MemoryStats stats;
};

Trained train(int rank, FullyShardOptions options, const MakeOptimizer& make_optimizer) {
  auto model = make_stack();
  options.mesh = line();
  options.units = stack_units();
  auto sharded = fsdp::fully_shard(*model, options);
  const auto optimizer = make_optimizer(*model);
  for (int step = 0; step < 3; ++step) {
    stack_loss(model, step, rank).backward();
    optimizer->step();
    optimizer->zero_grad();
  }
  return {sharded.full_parameters(), sharded.memory_stats()};
}

TEST(Offload, EveryOptimizerUpdatesToTheSameBits) {
  run_ranks(2, [](int rank) {
    struct Case {
      std::string name;
      MakeOptimizer make;
      FullyShardOptions options;
    };
    const auto by_blocks = [](const std::string&, const at::Tensor&) { return fsdp::Granularity::blocks(fsdp::AdamW8bit::kBlock); };
    const std::vector<Case> cases = {
        {"AdamW", make<fsdp::AdamW>(fsdp::AdamWOptions{.lr = 1e-2}), {}},
        {"SGD", make<fsdp::SGD>(fsdp::SGDOptions{.lr = 1e-2, .momentum = 0.9}), {}},
        {"Muon", make<fsdp::Muon>(fsdp::MuonOptions{.lr = 1e-2}), {.granularity = fsdp::whole_matrices()}},
        {"AdamW8bit", make<fsdp::AdamW8bit>(fsdp::AdamW8bitOptions{.lr = 1e-2, .min_8bit_size = 64}), {.granularity = by_blocks}}};
    for (const auto& [name, make_optimizer, options] : cases) {
      SCOPED_TRACE(name);
      const auto on_device = train(rank, options, make_optimizer);
      auto state_on_host = options;
      state_on_host.offload = Offload::kOptimizerState;
      const auto state = train(rank, state_on_host, make_optimizer);
      auto all_on_host = options;
      all_on_host.offload = Offload::kAll;
      const auto all = train(rank, all_on_host, make_optimizer);
      expect_same_bits(on_device.parameters, state.parameters);
      expect_same_bits(on_device.parameters, all.parameters);
      EXPECT_EQ(on_device.stats.host.peak, 0);
      // State alone: not less on the host than on the device before, and there only a part of it at a time.
      EXPECT_EQ(state.stats.host.live, on_device.stats.optimizer_state.live);
      EXPECT_EQ(state.stats.optimizer_state.live, 0);
      EXPECT_GT(state.stats.optimizer_state.peak, 0);
      EXPECT_LE(state.stats.optimizer_state.peak, on_device.stats.optimizer_state.live / 2);
      // All: nothing of what lasts is on the device.
      EXPECT_EQ(all.stats.optimizer_state.peak, 0);
      EXPECT_EQ(all.stats.main_parameters.peak, 0);
      EXPECT_EQ(all.stats.main_gradients.peak, 0);
      EXPECT_EQ(all.stats.total.live, 0);
      EXPECT_EQ(all.stats.host.peak,
                on_device.stats.main_parameters.live + on_device.stats.main_gradients.peak + on_device.stats.optimizer_state.live);
    }
  });
}

TEST(Offload, TorchsOptimizersUpdateOnTheHost) {
  run_ranks(2, [](int rank) {
    const MakeOptimizer wrapped = [](torch::nn::Module& module) {
      return std::make_unique<fsdp::WrappedOptimizer>(fsdp::wrap(module, [](std::vector<at::Tensor> parameters) {
        return std::make_unique<torch::optim::Adam>(std::move(parameters), torch::optim::AdamOptions(1e-2));
      }));
    };
    expect_same_bits(train(rank, {}, wrapped).parameters, train(rank, {.offload = Offload::kAll}, wrapped).parameters);
    EXPECT_THROW(train(rank, {.offload = Offload::kOptimizerState}, wrapped), fsdp::Error);
  });
}

// Each reduction adds to the main gradients in full precision and rounds once, wherever these are.
TEST(Offload, NarrowMainGradientsAddUpToTheSameBits) {
  run_ranks(2, [](int rank) {
    const auto gradients = [&](Offload offload, at::ScalarType wire) {
      auto model = make_stack();
      auto sharded = fsdp::fully_shard(
          *model, {.mesh = line(),
                   .units = stack_units(),
                   .mixed_precision = fsdp::MixedPrecisionPolicy{.main_grads_dtype = at::kBFloat16, .grad_comm_dtype = wire},
                   .offload = offload});
      for (int backward = 0; backward < 3; ++backward) stack_loss(model, backward, rank).backward();
      return sharded.full_gradients();
    };
    for (const auto wire : {at::kBFloat16, at::kFloat}) expect_same_bits(gradients(Offload::kNone, wire), gradients(Offload::kAll, wire));
  });
}

TEST(Offload, TheDeviceHoldsTwoReducedShardsAtMost) {
  run_ranks(2, [](int rank) {
    auto model = make_stack();
    auto sharded = fsdp::fully_shard(*model, {.mesh = line(), .units = stack_units(), .offload = Offload::kAll});
    stack_loss(model, 0, rank).backward();
    std::int64_t largest = 0;
    for (const auto& unit : sharded.engine()->units()) largest = std::max(largest, unit->main_gradient.buffer.bytes);
    EXPECT_GT(largest, 0);
    const auto stats = sharded.memory_stats();
    EXPECT_LE(stats.communication.peak, 2 * (largest + largest));  // The other rank's part is staged.
    EXPECT_EQ(stats.total.live, 0);
    EXPECT_EQ(stats.host.live, stats.host.peak);
  });
}

TEST(Offload, OperatorsWritesReachTheHost) {
  run_ranks(2, [](int rank) {
    for (const bool bf16 : {false, true}) {
      auto model = make_stack();
      FullyShardOptions options{.mesh = line(), .units = stack_units(), .offload = Offload::kAll};
      if (bf16) options.mixed_precision = fsdp::MixedPrecisionPolicy{.param_dtype = at::kBFloat16};
      auto sharded = fsdp::fully_shard(*model, options);
      const auto before = sharded.full_parameters();
      {
        const torch::NoGradGuard no_grad;
        model->head->weight.narrow(0, 0, 1).fill_(0.5);
      }
      const auto after = sharded.full_parameters();
      for (std::size_t i = 0; i < after.size(); ++i) {
        auto expected = before[i].second.clone();
        if (after[i].first == "head.weight") expected.narrow(0, 0, 1).fill_(0.5);
        EXPECT_TRUE(torch::equal(after[i].second, expected)) << after[i].first;
      }
      for (const auto& shard : sharded.parameter_shards()) EXPECT_TRUE(shard.value.is_cpu()) << shard.name;
    }
  });
}

TEST(Offload, UnshardingAndClippingWork) {
  run_ranks(2, [](int rank) {
    const auto outcome = [&](Offload offload) {
      auto model = make_stack();
      fsdp::fully_shard(*model, {.mesh = line(), .units = stack_units(), .offload = offload});
      fsdp::AdamW optimizer(*model, {.lr = 1e-2});
      stack_loss(model, 0, rank).backward();
      const auto norm = fsdp::clip_grad_norm(*model, 0.01);
      optimizer.step();
      fsdp::fully_unshard(*model);
      NamedTensors parameters{{"norm", torch::tensor(norm, at::kDouble)}};
      for (const auto& item : model->named_parameters()) parameters.emplace_back(item.key(), item.value().detach().clone());
      return parameters;
    };
    const auto on_device = outcome(Offload::kNone);
    expect_same_bits(on_device, outcome(Offload::kAll));
    expect_same_bits(on_device, outcome(Offload::kOptimizerState));
  });
}

}  // namespace offload_test
