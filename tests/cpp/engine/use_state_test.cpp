// How long parameters stay gathered: what the user pins, lists for prefetch or keeps after backward, seen on the wire and in memory.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "fsdp/fsdp.h"
#include "support/meshes.h"
#include "support/messages.h"
#include "support/multi_rank.h"
#include "support/predicted_memory.h"
#include "support/recording_communicator.h"
#include "support/stack.h"
#include "support/unkind_communicator.h"

namespace use_state_test {

using fsdp::testing::line;
using fsdp::testing::Log;
using fsdp::testing::make_stack;
using fsdp::testing::run_ranks;
using fsdp::testing::Stack;
using fsdp::testing::stack_loss;
using fsdp::testing::stack_units;
using fsdp::testing::StackOptions;

constexpr std::int64_t kBlocks = 5;

StackOptions five_blocks() { return {.hidden = {4, 5, 6, 7, 8}}; }

std::ptrdiff_t count_allocations(const Log& log) { return std::count(log.begin(), log.end(), "allocate"); }

/// A sharded stack of five blocks, and counts of what `body` gathers.
struct Sharded {
  explicit Sharded(const fsdp::FullyShardOptions& given = {}, int rank_ = 0) : model(make_stack(five_blocks())), rank(rank_) {
    auto options = given;
    if (!options.mesh.defined()) options.mesh = line();
    options.units = stack_units();
    handle.emplace(fsdp::fully_shard(*model, options));
    optimizer.emplace(*model, fsdp::AdamWOptions{.lr = 1e-2});
  }
  fsdp::FSDPModule block(std::size_t k) { return fsdp::handle(*model->blocks->ptr(k)); }
  template <typename Body>
  std::int64_t gathers(const Body& body) {
    handle->reset_wire_stats();
    body();
    return handle->wire_stats().all_gathers;
  }
  std::int64_t gathered_bytes() { return handle->memory_stats().gathered_parameters.live; }
  void update() {
    optimizer->step();
    optimizer->zero_grad();
  }
  at::Tensor loss(std::vector<std::size_t> order = {}) { return stack_loss(model, 0, rank, std::move(order)); }

  Stack model;
  int rank;
  std::optional<fsdp::FSDPModule> handle;
  std::optional<fsdp::AdamW> optimizer;
};

class UseState : public ::testing::TestWithParam<int> {};

TEST_P(UseState, KeptAfterBackwardIsNotGatheredByTheNextForward) {
  run_ranks(GetParam(), [](int rank) {
    for (const int depth : {0, 1, 2}) {
      for (const bool reshard_after_forward : {true, false}) {
        Sharded sharded({.reshard_after_forward = reshard_after_forward, .prefetch_depth = depth}, rank);
        sharded.handle->set_reshard_after_backward(false);
        at::Tensor loss;
        EXPECT_EQ(sharded.gathers([&] { loss = sharded.loss(); }), kBlocks + 1);
        // Forward frees all blocks but the last; backward gathers and keeps them.
        EXPECT_EQ(sharded.gathers([&] { loss.backward(); }), reshard_after_forward ? kBlocks - 1 : 0);
        for (int pass = 0; pass < 3; ++pass) {
          EXPECT_EQ(sharded.gathers([&] { loss = sharded.loss(); }), 0) << "depth " << depth << ", pass " << pass;
          EXPECT_EQ(sharded.gathers([&] { loss.backward(); }), reshard_after_forward ? kBlocks - 1 : 0);
        }
        // Parameters that have changed are gathered anew.
        sharded.update();
        EXPECT_EQ(sharded.gathered_bytes(), 0);
        EXPECT_EQ(sharded.gathers([&] { loss = sharded.loss(); }), kBlocks + 1);
      }
    }
  });
}

// [Bounded memory] Where units are still present after backward, a step ends at the update, and a plan is made like elsewhere.
TEST_P(UseState, KeptAfterBackwardTheStepEndsAtTheUpdate) {
  run_ranks(GetParam(), [](int rank) {
    auto model = make_stack({.hidden = {64, 32, 16, 8}});
    auto sharded = fsdp::fully_shard(*model, {.mesh = line(), .units = stack_units()});
    sharded.set_reshard_after_backward(false);
    fsdp::AdamW optimizer(*model);
    const auto slots_after = [&](int steps) {
      for (int step = 0; step < steps; ++step) {
        stack_loss(model, step, rank).backward();
        optimizer.step();
        optimizer.zero_grad();
      }
      return sharded.memory_stats().slots.live;
    };
    const auto unplanned = slots_after(2);
    EXPECT_LT(slots_after(4), unplanned);
  });
}

// A write leads to the next forward, whose first units are gathered ahead of it. full_parameters() waits for them. The root, which has come
// in this way, is in use then, and stays until forward has come back to it.
TEST_P(UseState, WhatWasPredictedStaysWhileItIsInUse) {
  run_ranks(GetParam(), [](int rank) {
    Sharded sharded({.prefetch_depth = 3}, rank);
    const torch::NoGradGuard no_grad;
    for (int step = 0; step < 2; ++step) {
      {
        const torch::AutoGradMode with_grad(true);
        sharded.loss().backward();
      }
      sharded.update();
      sharded.model->blocks->at<fsdp::testing::StackBlockImpl>(kBlocks - 1).up->weight.mul_(0.5);
    }
    auto plain = make_stack(five_blocks());
    auto values = plain->named_parameters();
    for (const auto& [name, whole] : sharded.handle->full_parameters()) values[name].copy_(whole);
    EXPECT_EQ(sharded.loss().item<float>(), stack_loss(plain, 0, rank).item<float>());
  });
}

TEST_P(UseState, PinnedUnitsStayUntilTheyAreUsed) {
  run_ranks(GetParam(), [](int rank) {
    for (const bool waits : {true, false}) {
      for (const int depth : {0, 1, 2}) {
        Sharded sharded({.prefetch_depth = depth}, rank);
        sharded.loss().backward();  // the order of units is known from here on
        sharded.update();
        const auto pin_all = [&] {
          for (std::size_t k = 0; k < kBlocks; ++k) {
            if (waits) {
              sharded.block(k).unshard();
            } else {
              sharded.block(k).unshard_async();
            }
          }
        };
        EXPECT_EQ(sharded.gathers(pin_all), kBlocks);
        const auto pinned = sharded.gathered_bytes();
        at::Tensor loss;
        EXPECT_EQ(sharded.gathers([&] { loss = sharded.loss(); }), 1) << "the root alone";
        // Used, they go as any other: the last block and the root are left.
        EXPECT_LT(sharded.gathered_bytes(), pinned);
        EXPECT_EQ(sharded.gathers([&] { loss.backward(); }), kBlocks - 1);
        EXPECT_EQ(sharded.gathered_bytes(), 0);
      }
    }
  });
}

TEST_P(UseState, PinnedUnitsOutliveWhatDoesNotUseThem) {
  run_ranks(GetParam(), [](int rank) {
    for (const int depth : {0, 1}) {
      Sharded sharded({.prefetch_depth = depth}, rank);
      sharded.loss().backward();
      sharded.handle->zero_grad();
      sharded.block(3).unshard();
      const auto one = sharded.gathered_bytes();
      EXPECT_GT(one, 0);
      sharded.loss({0, 1, 2}).backward();
      sharded.handle->zero_grad();
      EXPECT_EQ(sharded.gathered_bytes(), one);
      // Forward gathers the others only, backward all that forward has left. (With read-ahead, wrong predictions come on top.)
      const auto gathers = sharded.gathers([&] { sharded.loss({0, 3, 1}).backward(); });
      if (depth == 0) {
        EXPECT_EQ(gathers, 3 + 2);
      }
      sharded.handle->zero_grad();
      EXPECT_EQ(sharded.gathered_bytes(), 0);
      sharded.block(3).unshard();
      sharded.block(3).reshard();
      EXPECT_EQ(sharded.gathered_bytes(), 0);
      // A copy of parameters that have changed is of no use.
      sharded.block(3).unshard();
      sharded.update();
      EXPECT_EQ(sharded.gathered_bytes(), 0);
    }
  });
}

/// In inference the last block stays in use when forward has ended. Pinned then, it survives the next forward's beginning.
TEST_P(UseState, TheLastUnitOfAForwardCanBePinned) {
  run_ranks(GetParam(), [](int rank) {
    Sharded sharded({.prefetch_depth = 0}, rank);
    const torch::NoGradGuard no_grad;
    sharded.loss();
    EXPECT_EQ(sharded.gathers([&] { sharded.block(kBlocks - 1).unshard(); }), 0);
    EXPECT_EQ(sharded.gathers([&] { sharded.loss(); }), kBlocks - 1);
  });
}

// What neighbours keep after forward is freed with the backward, also of units that it does not enter.
TEST(UseStateOfFour, PartsKeptByNeighboursGoWithTheBackward) {
  run_ranks(4, [](int rank) {
    Sharded sharded({.reshard_after_forward_size = 2}, rank);
    {
      const torch::NoGradGuard no_grad;
      sharded.loss();
    }
    EXPECT_GT(sharded.gathered_bytes(), 0);
    sharded.loss({0}).backward();
    EXPECT_EQ(sharded.gathered_bytes(), 0);
    {
      const torch::NoGradGuard no_grad;
      sharded.loss();
    }
    sharded.handle->reset();
    EXPECT_EQ(sharded.gathered_bytes(), 0);
  });
}

struct WithEmptyImpl : torch::nn::Module {
  WithEmptyImpl() : nothing(register_parameter("nothing", torch::ones({0, 3}))) {}
  at::Tensor nothing;
};
TORCH_MODULE(WithEmpty);

// A unit whose parameters have no elements can be used as any other.
TEST(UseStateOfTwo, UnitsWithoutElements) {
  run_ranks(2, [] {
    torch::nn::Sequential model(torch::nn::Linear(3, 3));
    WithEmpty empty;
    model->register_module("empty", empty);
    fsdp::fully_shard(*model, {.mesh = line(), .units = fsdp::each<WithEmptyImpl>()});
    for (int step = 0; step < 2; ++step) {
      const auto loss = model->forward(torch::ones({2, 3})).sum() + empty->nothing.sum();
      loss.backward();
      EXPECT_TRUE(std::isfinite(loss.item<double>()));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, UseState, ::testing::Values(2, 4), [](const auto& info) { return std::to_string(info.param); });

/// The events of a forward and a backward in which each unit lists the `depth` units after (before) it.
Log log_with_lists(int depth) {
  const auto log = std::make_shared<Log>();
  Sharded sharded({.mesh = fsdp::testing::recorded(fsdp::null_device_mesh({{"dp_shard", 4}}), log)});
  const auto listed = [&](std::int64_t from, std::int64_t direction) {
    std::vector<fsdp::FSDPModule> modules;
    for (std::int64_t k = from; k >= 0 && k < kBlocks && static_cast<int>(modules.size()) < depth; k += direction) {
      modules.push_back(sharded.block(static_cast<std::size_t>(k)));
    }
    return modules;
  };
  sharded.handle->set_modules_to_forward_prefetch(listed(0, 1));
  for (std::int64_t k = 0; k < kBlocks; ++k) {
    sharded.block(static_cast<std::size_t>(k)).set_modules_to_forward_prefetch(listed(k + 1, 1));
    sharded.block(static_cast<std::size_t>(k)).set_modules_to_backward_prefetch(listed(k - 1, -1));
  }
  sharded.model->observer = [log](const std::string& event) { log->push_back(event); };
  for (int step = 0; step < 2; ++step) {
    log->clear();
    sharded.loss().backward();
    sharded.update();
  }
  return *log;
}

std::ptrdiff_t at(const Log& log, const std::string& event, std::ptrdiff_t from = 0) {
  return std::find(log.begin() + from, log.end(), event) - log.begin();
}

std::string joined(const Log& log) {
  std::string text;
  for (const auto& event : log) text += event + "\n";
  return text;
}

std::string block(std::int64_t k) { return "blocks." + std::to_string(k); }

TEST(PrefetchLists, StartWhenTheListingUnitIsEntered) {
  for (const int depth : {1, 2, 3}) {
    SCOPED_TRACE(depth);
    const auto log = log_with_lists(depth);
    SCOPED_TRACE(joined(log));
    // The root's list starts before the root is waited for.
    for (std::int64_t k = 0; k < depth; ++k) EXPECT_LT(at(log, "gather " + block(k)), at(log, "wait gather (root)"));
    const auto backward = at(log, "backward " + block(kBlocks - 1));
    for (std::int64_t k = 0; k < kBlocks; ++k) {
      const auto entered = at(log, "forward " + block(k));
      EXPECT_LT(entered, at(log, "wait gather " + block(k)));
      // All of the list is under way before the unit itself is waited for, and the last of it was not before.
      for (std::int64_t ahead = k + 1; ahead <= std::min(k + depth, kBlocks - 1); ++ahead) {
        EXPECT_LT(at(log, "gather " + block(ahead)), at(log, "wait gather " + block(k)));
      }
      if (k + depth < kBlocks) {
        EXPECT_GT(at(log, "gather " + block(k + depth)), entered);
      }
      const auto entered_again = at(log, "backward " + block(k));
      for (std::int64_t ahead = k - 1; ahead >= std::max<std::int64_t>(k - depth, 0); --ahead) {
        const auto gathered = at(log, "gather " + block(ahead), backward);
        if (k < kBlocks - 1) {
          EXPECT_LT(gathered, at(log, "wait gather " + block(k), backward));
        }
        if (ahead == k - depth) {
          EXPECT_GT(gathered, entered_again);
        }
        EXPECT_LT(gathered, at(log, "backward " + block(ahead), backward));
      }
    }
    for (std::int64_t k = 0; k < kBlocks; ++k) {
      EXPECT_EQ(std::count(log.begin(), log.end(), "gather " + block(k)), k == kBlocks - 1 ? 1 : 2) << block(k);
    }
  }
}

// What one unit has listed stays until it is used, whatever the units in between list.
TEST(PrefetchLists, StayUntilTheyAreUsed) {
  const auto log = std::make_shared<Log>();
  Sharded sharded({.mesh = fsdp::testing::recorded(fsdp::null_device_mesh({{"dp_shard", 4}}), log), .prefetch_depth = 0});
  sharded.block(0).set_modules_to_forward_prefetch({sharded.block(1), sharded.block(2), sharded.block(3)});
  sharded.model->observer = [log](const std::string& event) { log->push_back(event); };
  {
    const torch::NoGradGuard no_grad;
    sharded.loss();
  }
  SCOPED_TRACE(joined(*log));
  for (std::int64_t k = 0; k < kBlocks; ++k) EXPECT_EQ(std::count(log->begin(), log->end(), "gather " + block(k)), 1);
  for (std::int64_t k = 1; k < 4; ++k) EXPECT_LT(at(*log, "gather " + block(k)), at(*log, "wait gather " + block(0)));
  EXPECT_GT(at(*log, "gather " + block(4)), at(*log, "forward " + block(4)));
}

// What was listed in vain is freed when backward ends.
TEST(PrefetchLists, InVainAreFreedWithTheBackward) {
  run_ranks(2, [](int rank) {
    Sharded sharded({.prefetch_depth = 0}, rank);
    sharded.block(0).set_modules_to_forward_prefetch({sharded.block(4)});
    const auto loss = sharded.loss({0, 1});
    sharded.handle->reset_wire_stats();
    loss.backward();
    EXPECT_EQ(sharded.gathered_bytes(), 0);
  });
}

// After an update, the shards of all units travel over the outer dimension, those of units too that nothing uses before the next update.
TEST(Writers, WaitForGathersThatNothingUsed) {
  run_ranks(2, [](int rank) {
    std::string misuse;
    const auto mesh = fsdp::testing::unkind(fsdp::testing::plane(), {.max_delay = std::chrono::microseconds(0),
                                                                     .report = [&](const std::string& text) { misuse += text + "\n"; }});
    Sharded run({.mesh = mesh, .outer_placements = fsdp::Placements::optim()}, rank);
    run.loss().backward();
    run.optimizer->step();
    run.loss({0}).backward();  // The other blocks keep their gradients, and are updated again.
    run.optimizer->step();
    EXPECT_EQ(misuse, "");
    {
      const fsdp::SummonFullParams whole(*run.model);
      for (const auto& parameter : run.model->parameters()) parameter.detach().fill_(1);
    }
    for (const auto& [name, value] : run.handle->full_parameters()) EXPECT_TRUE(torch::equal(value, torch::ones_like(value))) << name;
    run.loss().backward();  // Gathers again, which ends the gathers that were under way.
    EXPECT_EQ(misuse, "");
  });
}

// A wrong transition is a fault of the library, and says where. It changes nothing.
TEST(ParameterState, RefusesWrongTransitions) {
  using fsdp::engine::ParameterState;
  run_ranks(2, [](int rank) {
    Sharded sharded({}, rank);
    auto& unit = *sharded.block(0).engine()->units()[sharded.block(0).unit()];
    ASSERT_EQ(unit.state(), ParameterState::kSharded);
    const auto refuses = [&](ParameterState to, const std::string& said) {
      const auto before = unit.state();
      const auto message = fsdp::testing::message_of<fsdp::Error>([&] { unit.set_state(to); });
      EXPECT_TRUE(fsdp::testing::has(message, "internal: unit 'blocks.0' can't go from parameter state " + said)) << message;
      EXPECT_EQ(unit.state(), before);
    };
    refuses(ParameterState::kPresent, "0 to 2");
    unit.set_state(ParameterState::kGathering);
    refuses(ParameterState::kGathering, "1 to 1");
    unit.set_state(ParameterState::kPresent);
    refuses(ParameterState::kGathering, "2 to 1");
    refuses(ParameterState::kPresent, "2 to 2");
    unit.set_state(ParameterState::kSharded);
  });
}

TEST(UseState, BuffersComeFromTheGroupWhereThatIsAskedFor) {
  run_ranks(2, [](int rank) {
    const auto log = std::make_shared<Log>();
    Sharded sharded({.mesh = fsdp::testing::recorded(line(), log)}, rank);
    const auto step = [&] {
      const auto loss = sharded.loss();
      loss.backward();
      sharded.update();
      return loss.item<double>();
    };
    Sharded reference({}, rank);
    const auto expected_step = [&] {
      const auto loss = reference.loss();
      loss.backward();
      reference.update();
      return loss.item<double>();
    };
    EXPECT_EQ(step(), expected_step());
    EXPECT_EQ(count_allocations(*log), 0);
    sharded.handle->set_allocate_memory_from_process_group_for_comm(true);
    EXPECT_EQ(sharded.handle->memory_stats().slots.live, 0);
    log->clear();
    EXPECT_EQ(step(), expected_step());
    EXPECT_GT(count_allocations(*log), 0);
    EXPECT_EQ(step(), expected_step());
    sharded.handle->set_allocate_memory_from_process_group_for_comm(false);
    EXPECT_EQ(sharded.handle->memory_stats().slots.live, 0);
    log->clear();
    EXPECT_EQ(step(), expected_step());
    EXPECT_EQ(count_allocations(*log), 0);
  });
}

}  // namespace use_state_test
