// [Alone] A rank that has all rows holds and moves nothing twice.

#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/fsdp.h"
#include "support/meshes.h"
#include "support/multi_rank.h"
#include "support/reference.h"
#include "support/stack.h"

namespace alone_test {

using fsdp::Placements;
using fsdp::testing::all_strategies;
using fsdp::testing::line;
using fsdp::testing::make_stack;
using fsdp::testing::run_ranks;
using fsdp::testing::stack_loss;
using fsdp::testing::stack_units;

std::map<std::string, std::int64_t> calls;  // Of operators, while they are counted.

std::unique_ptr<at::ObserverContext> count(const at::RecordFunction& call) {
  ++calls[call.name()];
  return nullptr;
}

/// How often `body` calls operators that copy, or add up.
template <typename Body>
std::int64_t copies(const Body& body) {
  calls.clear();
  const auto handle = at::addThreadLocalCallback(at::RecordFunctionCallback(&count).scopes({at::RecordScope::FUNCTION}));
  body();
  at::removeCallback(handle);
  return calls["aten::copy_"] + calls["aten::add_"];
}

TEST(Alone, TheWholeParametersAreTheMainOnes) {
  run_ranks(1, [] {
    for (const auto& strategy : all_strategies()) {
      SCOPED_TRACE(strategy);
      auto plain = make_stack();
      torch::optim::SGD plain_optimizer(plain->parameters(), 0.1);
      auto model = make_stack();
      std::int64_t whole = 0;
      for (const auto& parameter : model->parameters()) whole += static_cast<std::int64_t>(parameter.nbytes());
      auto sharded = fsdp::fully_shard(*model, {.mesh = line(), .units = stack_units(), .placements = Placements::from_name(strategy)});
      fsdp::SGD optimizer(*model, {.lr = 0.1});
      for (int step = 0; step < 3; ++step) {
        sharded.reset_peak_memory_stats();
        sharded.reset_wire_stats();
        at::Tensor plain_loss;
        const auto expected = copies([&] {
          plain_loss = stack_loss(plain, step, 0);
          plain_loss.backward();
        });
        at::Tensor loss;
        const auto made = copies([&] {
          loss = stack_loss(model, step, 0);
          loss.backward();
        });
        EXPECT_TRUE(at::equal(loss, plain_loss));
        EXPECT_EQ(made, expected) << "gradients are copied to where they are used, by memcpy, and nothing else is";
        const auto stats = sharded.memory_stats();
        EXPECT_GE(stats.main_parameters.live, whole);
        EXPECT_LT(stats.main_parameters.live, whole + 5 * 64 * 8) << "each parameter begins at a multiple of 64 bytes";
        EXPECT_EQ(stats.gathered_parameters.peak, 0);
        EXPECT_EQ(stats.unreduced_gradients.peak, 0);
        EXPECT_EQ(stats.communication.peak, 0);
        EXPECT_EQ(stats.slots.peak, 0);
        EXPECT_EQ(stats.main_gradients.live, stats.main_parameters.live);
        EXPECT_EQ(sharded.wire_stats().all_gathers, 0);
        plain_optimizer.step();
        plain_optimizer.zero_grad();
        optimizer.step();
        optimizer.zero_grad();
      }
      const auto expected = plain->named_parameters();
      for (const auto& [name, value] : sharded.full_parameters()) EXPECT_TRUE(at::equal(value, expected[name])) << name;
    }
  });
}

// Where whole parameters are others than the main ones, the strategy is what was asked for.
TEST(Alone, ConversionsAndOffloadHaveBoth) {
  run_ranks(1, [] {
    const auto peak = [](fsdp::FullyShardOptions options) {
      auto model = make_stack();
      options.mesh = line();
      options.units = stack_units();
      auto sharded = fsdp::fully_shard(*model, options);
      const auto dtype = options.mixed_precision ? at::kBFloat16 : at::kFloat;
      fsdp::forward(model, fsdp::testing::stack_input(0, 0).to(dtype)).sum().backward();
      return sharded.memory_stats().gathered_parameters.peak;
    };
    EXPECT_EQ(peak({}), 0);
    EXPECT_GT(peak({.mixed_precision = fsdp::MixedPrecisionPolicy{.param_dtype = at::kBFloat16}}), 0);
    EXPECT_GT(peak({.offload = fsdp::Offload::kAll}), 0);
  });
}

}  // namespace alone_test
