// What goes wrong in training: exceptions, ranks that die or differ. Each must end in one clear error, and leave usable what can be.

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <functional>
#include <memory>
#include <regex>
#include <stdexcept>
#include <string>
#include <vector>

#include "comm/launch/launch.h"
#include "fsdp/fsdp.h"
#include "support/messages.h"
#include "support/multi_rank.h"
#include "support/reference.h"
#include "support/stack.h"

namespace failure_test {

using fsdp::CommError;
using fsdp::FullyShardOptions;
using fsdp::Placements;
using fsdp::testing::all_strategies;
using fsdp::testing::has;
using fsdp::testing::make_stack;
using fsdp::testing::message_of;
using fsdp::testing::run_ranks;
using fsdp::testing::stack_loss;
using fsdp::testing::stack_units;

fsdp::DeviceMesh world(std::chrono::milliseconds timeout = std::chrono::seconds(20), bool shared_memory = true) {
  return fsdp::init_device_mesh("cpu", {{"dp_shard", -1}}, {.timeout = timeout, .shared_memory = shared_memory});
}

// Exceptions of the user's own, on all ranks alike.

struct Disturbance {
  std::string where;  ///< The observer's event at which the exception is thrown.
  bool without_sync = false;
  bool reset_by_hand = false;
};

/// The parameters after some steps, disturbed in between or not.
fsdp::testing::NamedTensors train(const fsdp::DeviceMesh& mesh, FullyShardOptions options, const Disturbance* disturbance) {
  options.mesh = mesh;
  options.units = stack_units();
  auto model = make_stack();
  auto sharded = fsdp::fully_shard(*model, options);
  fsdp::AdamW optimizer(*model, {.lr = 1e-2});
  const auto step = [&](std::int64_t number) {
    stack_loss(model, number, mesh.rank()).backward();
    optimizer.step();
    optimizer.zero_grad();
  };
  for (int number = 0; number < 2; ++number) {
    step(number);
    if (disturbance == nullptr) continue;
    model->observer = [&](const std::string& event) {
      if (event == disturbance->where) throw std::runtime_error("thrown at " + event);
    };
    sharded.set_requires_gradient_sync(!disturbance->without_sync);
    const auto message = message_of<std::runtime_error>([&] { stack_loss(model, 50, mesh.rank()).backward(); });
    EXPECT_TRUE(has(message, "thrown at " + disturbance->where)) << message;
    sharded.set_requires_gradient_sync(true);
    model->observer = {};
    if (disturbance->reset_by_hand) {
      sharded.reset();
      const auto stats = sharded.memory_stats();
      EXPECT_EQ(stats.unreduced_gradients.live, 0);
      EXPECT_EQ(stats.communication.live, 0);
      if (options.placements.parameters == fsdp::Placement::kSharded) {
        EXPECT_EQ(stats.gathered_parameters.live, 0);
      }
    }
    optimizer.zero_grad();
  }
  step(2);
  step(3);
  const auto stats = sharded.memory_stats();
  EXPECT_EQ(stats.unreduced_gradients.live, 0);
  EXPECT_EQ(stats.communication.live, 0);
  return sharded.full_parameters();
}

class Failure : public ::testing::TestWithParam<int> {};

TEST_P(Failure, ExceptionsLeaveTheModelUsable) {
  run_ranks(GetParam(), [] {
    const auto mesh = world();
    for (const auto& strategy : all_strategies()) {
      for (const bool reshard : {true, false}) {
        if (!reshard && strategy != "optim_grads_params") continue;  // nothing else is freed after forward
        const FullyShardOptions options{.placements = Placements::from_name(strategy), .reshard_after_forward = reshard};
        const auto undisturbed = train(mesh, options, nullptr);
        for (const Disturbance& disturbance : {
                 Disturbance{.where = "forward blocks.0"},
                 Disturbance{.where = "forward blocks.2"},
                 Disturbance{.where = "forward blocks.3", .reset_by_hand = true},
                 Disturbance{.where = "backward blocks.3"},
                 Disturbance{.where = "backward blocks.1"},
                 Disturbance{.where = "backward blocks.0", .reset_by_hand = true},
                 Disturbance{.where = "backward blocks.1", .without_sync = true},
             }) {
          fsdp::testing::expect_same(train(mesh, options, &disturbance), undisturbed, 0, strategy + ", " + disturbance.where);
        }
      }
    }
  });
}

// One unit for the whole model: nothing moves, so nothing but gradients tells the engine that the next backward has begun.
TEST_P(Failure, ExceptionsInBackwardOfASingleUnit) {
  run_ranks(GetParam(), [] {
    const auto mesh = world();
    const auto run = [&](bool disturbed) {
      auto model = make_stack();
      auto sharded = fsdp::fully_shard(*model, {.mesh = mesh});
      fsdp::AdamW optimizer(*model, {.lr = 1e-2});
      for (int step = 0; step < 3; ++step) {
        if (disturbed) {
          model->observer = [](const std::string& event) {
            if (event == "backward blocks.1") throw std::runtime_error("no");
          };
          EXPECT_THROW(stack_loss(model, 50, mesh.rank()).backward(), std::runtime_error);
          model->observer = {};
        }
        stack_loss(model, step, mesh.rank()).backward();
        optimizer.step();
        optimizer.zero_grad();
      }
      return sharded.full_parameters();
    };
    fsdp::testing::expect_same(run(true), run(false), 0, "single unit");
  });
}

// Between two backward passes whose gradients add up, without a zero_grad: the failed one leaves no trace if it reduced nothing.
TEST_P(Failure, AnExceptionInForwardKeepsAccumulatedGradients) {
  run_ranks(GetParam(), [] {
    const auto mesh = world();
    for (const auto& strategy : all_strategies()) {
      const auto gradients = [&](bool disturbed) {
        auto model = make_stack();
        auto sharded = fsdp::fully_shard(*model, {.mesh = mesh, .units = stack_units(), .placements = Placements::from_name(strategy)});
        for (const bool sync : {false, true, true}) {
          sharded.set_requires_gradient_sync(sync);
          if (disturbed) {
            model->observer = [](const std::string& event) {
              if (event == "forward blocks.2") throw std::runtime_error("no");
            };
            EXPECT_THROW(stack_loss(model, 50, mesh.rank()), std::runtime_error);
            model->observer = {};
          }
          stack_loss(model, sync, mesh.rank()).backward();
        }
        return sharded.full_gradients();
      };
      fsdp::testing::expect_same(gradients(true), gradients(false), 0, strategy);
    }
  });
}

TEST_P(Failure, ZeroGradDropsUnreducedGradientsToo) {
  run_ranks(GetParam(), [] {
    const auto mesh = world();
    for (const auto& strategy : all_strategies()) {
      const auto gradients = [&](bool with_leftovers) {
        auto model = make_stack();
        auto sharded = fsdp::fully_shard(*model, {.mesh = mesh, .units = stack_units(), .placements = Placements::from_name(strategy)});
        if (with_leftovers) {
          sharded.set_requires_gradient_sync(false);
          stack_loss(model, 50, mesh.rank()).backward();
          sharded.zero_grad();
          sharded.set_requires_gradient_sync(true);
          EXPECT_EQ(sharded.memory_stats().unreduced_gradients.live, 0);
        }
        stack_loss(model, 1, mesh.rank()).backward();
        return sharded.full_gradients();
      };
      fsdp::testing::expect_same(gradients(true), gradients(false), 0, strategy);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Failure, ::testing::Values(1, 2, 4), [](const auto& info) { return std::to_string(info.param); });

// Ranks that die.

/// Trains until rank 1 leaves at the observer's event in step 2. The other ranks' error is checked against `expected`.
void a_rank_leaves_at(const std::string& event, const std::string& strategy, int ranks) {
  SCOPED_TRACE(event + ", " + strategy);
  ::testing::internal::CaptureStderr();
  const int result = fsdp::comm::launch_ranks(
      ranks,
      [&] {
        alarm(40);
        const auto mesh = world(std::chrono::seconds(3));
        auto model = make_stack();
        fsdp::fully_shard(*model, {.mesh = mesh, .units = stack_units(), .placements = Placements::from_name(strategy)});
        fsdp::AdamW optimizer(*model);
        int step = 0;
        model->observer = [&](const std::string& now) {
          if (mesh.rank() == 1 && step == 2 && now == event) _exit(3);
        };
        const auto message = message_of<CommError>([&] {
          for (; step < 50; ++step) {
            stack_loss(model, step, mesh.rank()).backward();
            optimizer.step();
            optimizer.zero_grad();
          }
        });
        const std::regex expected(
            "(all-gather|all-gather of gradients|reduce-scatter|exchange of which parameters have gradients) of (the root unit|unit "
            "'blocks\\.[0-3]') on rank " +
            std::to_string(mesh.rank()) + " of " + std::to_string(ranks) +
            " (failed: |was not started)[\\s\\S]*last units that this rank touched, newest first: '(blocks|\\(root)[\\s\\S]*");
        if (!std::regex_match(message, expected)) throw std::runtime_error("message: " + message);
        // What is tried afterwards fails at once, and says why.
        const auto next = message_of<CommError>([&] {
          stack_loss(model, 0, mesh.rank()).backward();
          optimizer.step();
          stack_loss(model, 0, mesh.rank()).backward();
        });
        if (!has(next, " failed: ")) throw std::runtime_error("next message: " + next);
        return 0;
      },
      {.grace = std::chrono::seconds(20)});
  EXPECT_EQ(result, 3);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "rank 1 left by exit(3) before its function returned\n");
}

TEST(DyingRank, FailsTheOthersWithANamedError) {
  a_rank_leaves_at("forward blocks.1", "optim_grads_params", 2);
  a_rank_leaves_at("backward blocks.2", "optim_grads_params", 4);
  a_rank_leaves_at("backward blocks.2", "optim_grads", 2);
  a_rank_leaves_at("forward blocks.2", "no_shard", 2);
}

TEST(HangingRank, TimesOutWithANamedError) {
  for (const bool shared : {true, false}) {
    run_ranks(2, [shared](int rank) {
      const auto mesh = world(std::chrono::milliseconds(500), shared);
      auto model = make_stack();
      fsdp::fully_shard(*model, {.mesh = mesh, .units = stack_units()});
      fsdp::AdamW optimizer(*model);
      stack_loss(model, 0, rank).backward();
      if (rank == 1) {
        usleep(1'500'000);
        return;
      }
      const auto message = message_of<CommError>([&] {
        optimizer.step();
        stack_loss(model, 1, rank).backward();
      });
      EXPECT_TRUE(has(message, "all-gather of the root unit on rank 0 of 2 failed: ")) << message;
      EXPECT_TRUE(has(message, "receiving from rank 1")) << message;
      EXPECT_TRUE(has(message, "MeshOptions::timeout")) << message;
      EXPECT_TRUE(has(message, "; last units that this rank touched, newest first: '(root)'")) << message;
      EXPECT_FALSE(has(message, ".;")) << message;
    });
  }
}

// Ranks that do different things, with FSDP_DEBUG=1.

class DebugMode : public ::testing::Test {
 protected:
  void SetUp() override { setenv("FSDP_DEBUG", "1", 1); }
  void TearDown() override { unsetenv("FSDP_DEBUG"); }
};

TEST_F(DebugMode, ChangesNothingWhereRanksAgree) {
  run_ranks(2, [] {
    const auto mesh = world();
    const auto parameters = train(mesh, {}, nullptr);
    unsetenv("FSDP_DEBUG");
    fsdp::testing::expect_same(train(world(), {}, nullptr), parameters, 0, "without FSDP_DEBUG");
  });
}

TEST_F(DebugMode, AnotherUnitPrintsBothSides) {
  for (const int step : {0, 2}) {
    run_ranks(2, [step](int rank) {
      const auto mesh = world();
      auto model = make_stack();
      fsdp::fully_shard(*model, {.mesh = mesh, .units = stack_units(), .prefetch_depth = 0});
      fsdp::AdamW optimizer(*model);
      for (int i = 0; i < step; ++i) {
        stack_loss(model, i, rank).backward();
        optimizer.step();
      }
      const auto message = message_of<CommError>([&] {
        stack_loss(model, step, rank, rank == 0 ? std::vector<std::size_t>{0, 1, 2, 3} : std::vector<std::size_t>{0, 2, 1, 3});
      });
      EXPECT_TRUE(std::regex_search(message, std::regex("rank 0: #(\\d+) all-gather of unit 'blocks\\.1'; rank 1: #\\1 all-gather of "
                                                        "unit 'blocks\\.2'")))
          << message;
      EXPECT_TRUE(has(message, "on rank " + std::to_string(rank) + " of 2")) << message;
      EXPECT_TRUE(has(message, std::string("newest first: 'blocks.") + (rank == 0 ? "1" : "2") + "', 'blocks.0', '(root)'")) << message;
    });
  }
}

TEST_F(DebugMode, OneStepFewerPrintsBothSides) {
  run_ranks(2, [](int rank) {
    std::string message;
    ::testing::internal::CaptureStderr();
    {
      auto mesh = world();
      auto model = make_stack();
      fsdp::fully_shard(*model, {.mesh = mesh, .units = stack_units()});
      fsdp::AdamW optimizer(*model);
      message = message_of<CommError>([&] {
        for (int step = 0; step < (rank == 0 ? 2 : 3); ++step) {
          stack_loss(model, step, rank).backward();
          optimizer.step();
          optimizer.zero_grad();
        }
      });
    }
    const auto printed = ::testing::internal::GetCapturedStderr();
    const std::regex both("rank 0: #(\\d+) end of training; rank 1: #\\1 all-gather of the root unit");
    EXPECT_TRUE(std::regex_search(rank == 0 ? printed : message, both)) << message << "\n" << printed;
    EXPECT_EQ(message == "no error", rank == 0) << message;
  });
}

TEST_F(DebugMode, AnotherBackwardPrintsBothSides) {
  run_ranks(2, [](int rank) {
    const auto mesh = world();
    auto model = make_stack();
    auto sharded = fsdp::fully_shard(*model, {.mesh = mesh, .units = stack_units(), .placements = Placements::optim_grads()});
    sharded.set_requires_gradient_sync(rank == 0);  // rank 1 forgot to switch it on again
    const auto message = message_of<CommError>([&] {
      stack_loss(model, 0, rank).backward();
      if (rank == 1) mesh.barrier();
    });
    EXPECT_TRUE(std::regex_search(message, std::regex("rank 0: #(\\d+) reduce-scatter of unit 'blocks\\.3'; rank 1: #\\1 barrier")))
        << message;
  });
}

}  // namespace failure_test
