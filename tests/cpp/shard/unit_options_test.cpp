// What an option changes: bytes, groups, collectives. That results stay the same is tested elsewhere, and would prove nothing of it.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <optional>
#include <set>
#include <string>

#include "comm/communicator.h"
#include "engine/engine.h"
#include "fsdp/fsdp.h"
#include "support/multi_rank.h"
#include "support/stack.h"

namespace unit_options_test {

using fsdp::testing::line;
using fsdp::testing::make_stack;
using fsdp::testing::run_ranks;
using fsdp::testing::stack_loss;
using fsdp::testing::stack_units;

TEST(UnitOptions, ReductionsMayHaveAGroupOfTheirOwn) {
  run_ranks(2, [](int rank) {
    for (const bool separate : {false, true}) {
      auto model = make_stack();
      const auto sharded = fsdp::fully_shard(*model, {.mesh = line(), .units = stack_units(), .separate_reduce_group = separate});
      for (const auto& unit : sharded.engine()->units()) {
        EXPECT_EQ(unit->communicators.reduce != unit->communicators.gather, separate) << unit->name;
        EXPECT_EQ(unit->communicators.reduce->size(), 2);
        EXPECT_EQ(unit->communicators.reduce->rank(), rank);
      }
    }
  });
}

TEST(UnitOptions, TheUnitsOfAMeshShareItsCommunicators) {
  run_ranks(4, [](int) {
    const auto mesh = line();
    std::set<fsdp::comm::Communicator*> reduce;
    std::set<fsdp::comm::Communicator*> post_forward;
    for (int models = 0; models < 2; ++models) {
      auto model = make_stack();
      const auto sharded =
          fsdp::fully_shard(*model, {.mesh = mesh, .units = stack_units(), .reshard_after_forward_size = 2, .separate_reduce_group = true});
      for (const auto& unit : sharded.engine()->units()) {
        reduce.insert(unit->communicators.reduce.get());
        post_forward.insert(unit->communicators.post_forward.get());
      }
    }
    EXPECT_EQ(reduce.size(), 1);
    EXPECT_EQ(post_forward.size(), 1);
  });
}

TEST(UnitOptions, SingleUnitsMayStayGathered) {
  run_ranks(2, [](int rank) {
    const auto gathers = [&](const std::string& stays) {
      auto model = make_stack();
      fsdp::FullyShardOptions options{.mesh = line(), .units = stack_units()};
      options.unit_settings = [&](const std::string& name, const torch::nn::Module&) {
        fsdp::UnitSettings settings;
        if (name == stays) settings.reshard_after_forward = false;
        return settings;
      };
      auto sharded = fsdp::fully_shard(*model, options);
      sharded.reset_wire_stats();
      stack_loss(model, 0, rank).backward();
      return sharded.wire_stats().all_gathers;
    };
    EXPECT_EQ(gathers("blocks.1"), gathers("none") - 1);
  });
}

// A forward alone leaves it behind; the next one must not read what is older than the parameters.
TEST(UnitOptions, WhatNeighboursKeepIsOutdatedByAnUpdate) {
  run_ranks(4, [](int rank) {
    const auto loss_after_an_update = [&](std::int64_t size) {
      auto model = make_stack();
      auto sharded = fsdp::fully_shard(*model, {.mesh = line(), .units = stack_units(), .reshard_after_forward_size = size});
      const torch::NoGradGuard no_grad;
      stack_loss(model, 0, rank);
      for (const auto& shard : sharded.parameter_shards()) shard.value.mul_(0.5);
      sharded.main_parameters_changed();
      return stack_loss(model, 0, rank).item<float>();
    };
    EXPECT_EQ(loss_after_an_update(2), loss_after_an_update(0));
  });
}

TEST(UnitOptions, GradientsMayHaveADtypeOfTheirOwn) {
  run_ranks(2, [](int rank) {
    const auto live = [&](std::optional<at::ScalarType> dtype) {
      auto model = make_stack();
      fsdp::FullyShardOptions options{.mesh = line(), .units = stack_units()};
      options.mixed_precision = fsdp::MixedPrecisionPolicy{.main_grads_dtype = dtype, .grad_comm_dtype = at::kFloat};
      options.granularity = [](const auto&, const auto&) { return fsdp::Granularity::blocks(16); };  // the same shards for all dtypes
      auto sharded = fsdp::fully_shard(*model, options);
      stack_loss(model, 0, rank).backward();
      for (const auto& shard : sharded.gradient_shards()) EXPECT_EQ(shard.value.scalar_type(), dtype.value_or(at::kFloat)) << shard.name;
      return sharded.memory_stats().main_gradients.live;
    };
    EXPECT_EQ(live(at::kDouble), 2 * live({}));
  });
}

TEST(UnitOptions, FrozenParametersKeepTheirDtype) {
  run_ranks(2, [] {
    auto model = make_stack();
    model->to(at::kBFloat16);
    model->head->weight.requires_grad_(false);
    fsdp::FullyShardOptions options{.mesh = line(), .units = stack_units()};
    options.mixed_precision = fsdp::MixedPrecisionPolicy{.main_params_dtype = at::kFloat};
    const auto sharded = fsdp::fully_shard(*model, options);
    for (const auto& shard : sharded.parameter_shards()) {
      EXPECT_EQ(shard.value.scalar_type(), shard.name == "head.weight" ? at::kBFloat16 : at::kFloat) << shard.name;
    }
  });
}

}  // namespace unit_options_test
