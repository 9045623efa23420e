// What single methods of the handle do by themselves, seen in bytes and collectives.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <vector>

#include "fsdp/fsdp.h"
#include "support/messages.h"
#include "support/multi_rank.h"
#include "support/stack.h"

namespace handle_test {

using fsdp::testing::line;
using fsdp::testing::make_stack;
using fsdp::testing::run_ranks;
using fsdp::testing::Stack;
using fsdp::testing::stack_loss;
using fsdp::testing::stack_units;

fsdp::FSDPModule block_of(Stack& model, std::size_t k) { return fsdp::handle(model->blocks->at<fsdp::testing::StackBlockImpl>(k)); }

TEST(Handle, UnshardAsyncStartsTheGather) {
  run_ranks(2, [] {
    auto model = make_stack();
    auto sharded = fsdp::fully_shard(*model, {.mesh = line(), .units = stack_units()});
    sharded.reset_wire_stats();
    auto pending = block_of(model, 1).unshard_async();
    EXPECT_EQ(sharded.wire_stats().all_gathers, 1);
    pending.wait();
    EXPECT_EQ(sharded.wire_stats().all_gathers, 1);
  });
}

TEST(Handle, ListedUnitsAreGatheredAhead) {
  run_ranks(2, [](int rank) {
    auto model = make_stack();
    auto sharded = fsdp::fully_shard(*model, {.mesh = line(), .units = stack_units(), .prefetch_depth = 0});
    block_of(model, 0).set_modules_to_forward_prefetch({block_of(model, 2), block_of(model, 3)});
    sharded.reset_wire_stats();
    const torch::NoGradGuard no_grad;
    stack_loss(model, 0, rank, {0});
    EXPECT_EQ(sharded.wire_stats().all_gathers, 4) << "the root's, the first block's, and those of two that nobody has used yet";
  });
}

TEST(Handle, WithoutRecurseOneUnitIsMeant) {
  run_ranks(2, [](int rank) {
    for (const bool recurse : {false, true}) {
      auto model = make_stack();
      auto sharded = fsdp::fully_shard(*model, {.mesh = line(), .units = stack_units()});
      sharded.set_requires_gradient_sync(false, recurse);
      sharded.reset_wire_stats();
      stack_loss(model, 0, rank).backward();
      EXPECT_EQ(sharded.wire_stats().reduce_scatters, recurse ? 0 : 4) << "the blocks', not the root's";
    }
  });
}

TEST(Handle, UnitsOfAnotherModelAreRefused) {
  run_ranks(1, [] {
    auto model = make_stack();
    auto other = make_stack();
    auto sharded = fsdp::fully_shard(*model, {.mesh = line(), .units = stack_units()});
    const auto elsewhere = fsdp::fully_shard(*other, {.mesh = line(), .units = stack_units()});
    for (const auto& message : {fsdp::testing::message_of([&] { sharded.set_modules_to_forward_prefetch({elsewhere}); }),
                                fsdp::testing::message_of([&] { sharded.set_modules_to_backward_prefetch({elsewhere}); })}) {
      EXPECT_TRUE(fsdp::testing::has(message, "belongs to another sharded model")) << message;
    }
  });
}

TEST(Handle, GradientShardsStayReadableAfterZeroGrad) {
  run_ranks(2, [](int rank) {
    auto model = make_stack({.width = 64, .hidden = {700}});
    auto sharded = fsdp::fully_shard(*model, {.mesh = line(), .units = stack_units()});
    stack_loss(model, 0, rank).backward();
    const auto kept = sharded.gradient_shards();
    std::vector<at::Tensor> copies;
    for (const auto& shard : kept) copies.push_back(shard.value.clone());
    sharded.zero_grad();
    std::vector<at::Tensor> others;  // takes the memory, if it is free
    for (const auto& unit_shard : kept) others.push_back(at::full({unit_shard.value.numel()}, 77.0));
    others.push_back(at::full({700 * 64 + 64 + 700}, 77.0));
    for (std::size_t i = 0; i < kept.size(); ++i) EXPECT_TRUE(kept[i].value.equal(copies[i])) << kept[i].name;
  });
}

TEST(Handle, ScaleGradientsWaitsForThem) {
  run_ranks(2, [](int rank) {
    const auto gradients = [&](bool is_last) {
      auto model = make_stack();
      auto sharded = fsdp::fully_shard(*model, {.mesh = line(), .units = stack_units(), .placements = fsdp::Placements::no_shard()});
      sharded.set_is_last_backward(is_last);
      stack_loss(model, 0, rank).backward();
      sharded.scale_gradients(0.25);
      return sharded.full_gradients();
    };
    const auto expected = gradients(true);
    const auto scaled = gradients(false);
    for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(scaled[i].second.equal(expected[i].second)) << expected[i].first;
  });
}

}  // namespace handle_test
