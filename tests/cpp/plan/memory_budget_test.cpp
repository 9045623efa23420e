// What a program hears of a memory budget: which units recompute, and a choice that measured activations correct.

#include "fsdp/memory_budget.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "fsdp/fsdp.h"
#include "plan/planned_model.h"
#include "support/meshes.h"
#include "support/messages.h"
#include "support/multi_rank.h"

namespace memory_budget_test {

using fsdp::FullyShardOptions;
using fsdp::MemoryBudget;
using fsdp::planned_device_mesh;
using fsdp::PlanOptions;
using fsdp::planning::Choice;
using fsdp::planning::PlannedModel;
using fsdp::testing::line;
using fsdp::testing::message_of;
using fsdp::testing::run_ranks;
using Bytes = std::map<std::string, std::int64_t>;

constexpr int kSteps = 7;  // From the sixth on, steps are alike.
const std::vector<std::int64_t> kHidden{30, 17, 44, 30, 9, 25};

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(std::int64_t hidden) {
    up = register_module("up", torch::nn::Linear(11, hidden));
    down = register_module("down", torch::nn::Linear(hidden, 11));
  }
  at::Tensor forward(const at::Tensor& x) {
    ++forwards;
    return x + down(at::tanh(up(x)));
  }
  torch::nn::Linear up{nullptr}, down{nullptr};
  int forwards = 0;
};
TORCH_MODULE(Block);

/// Its blocks repeat their forward in backward where a memory budget says so.
struct BlocksImpl : torch::nn::Module {
  BlocksImpl() {
    torch::manual_seed(3);
    for (const auto hidden : kHidden) blocks.push_back(register_module("b" + std::to_string(blocks.size()), Block(hidden)));
    head = register_module("head", torch::nn::Linear(11, 3));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& block : blocks) x = fsdp::recomputes(*block) ? fsdp::activation_checkpoint(block, x) : block->forward(x);
    return head(x);
  }
  /// In the order of these numbers.
  at::Tensor forward_by(const std::vector<std::size_t>& order, at::Tensor x) {
    for (const auto k : order) x = blocks[k]->forward(x);
    return head(x);
  }
  std::vector<Block> blocks;
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Blocks);

/// Larger than all that the engine has, so that they decide.
Bytes activations() {
  Bytes bytes;
  for (std::size_t k = 0; k < kHidden.size(); ++k) bytes["b" + std::to_string(k)] = 1000 * kHidden[k];
  return bytes;
}

Bytes inputs() {
  Bytes bytes;
  for (std::size_t k = 0; k < kHidden.size(); ++k) bytes["b" + std::to_string(k)] = 500;
  return bytes;
}

MemoryBudget budget_of(std::int64_t bytes) { return {.bytes = bytes, .planned = {.activations = activations()}, .recomputable = inputs()}; }

PlannedModel planned(int ranks) {
  const FullyShardOptions options{.mesh = planned_device_mesh("cpu", {{"dp_shard", ranks}}), .units = fsdp::each<Block>()};
  return {*Blocks(), options, {.activations = activations()}, inputs()};
}

/// The root, which is the first unit, and does not recompute, and the blocks that have a bit.
Choice recomputing(unsigned blocks, int prefetch_depth = 1) {
  Choice choice{.prefetch_depth = prefetch_depth};
  choice.recomputed.assign(1 + kHidden.size(), false);
  for (std::size_t k = 0; k < kHidden.size(); ++k) choice.recomputed[1 + k] = (blocks >> k & 1) != 0;
  return choice;
}

std::vector<bool> recomputed(const Blocks& model) {
  std::vector<bool> blocks;
  for (const auto& block : model->blocks) blocks.push_back(fsdp::recomputes(*block));
  return blocks;
}

/// Proportional to a block's elements, but for its last bias.
std::int64_t cost_of(const std::vector<bool>& blocks) {
  std::int64_t cost = 0;
  for (std::size_t k = 0; k < blocks.size(); ++k) cost += blocks[k] ? 23 * kHidden[k] + 11 : 0;
  return cost;
}

void train(Blocks& model, int steps) {
  fsdp::AdamW optimizer(*model, {.lr = 1e-2});
  for (int step = 0; step < steps; ++step) {
    if (step + 1 == steps) {
      fsdp::handle(*model).reset_peak_memory_stats();
      fsdp::handle(*model).reset_wire_stats();
    }
    model->forward(at::ones({2, 11})).sum().backward();
    optimizer.step();
    optimizer.zero_grad();
  }
}

void expect_fewest_recompute(int ranks) {
  const auto plans = planned(ranks);
  const auto most = plans.observe(recomputing(0)).most;
  const auto least = plans.observe(recomputing(0b111111)).most;
  // Of each set of blocks, what it needs.
  std::vector<std::pair<std::int64_t, std::int64_t>> sets;
  for (unsigned blocks = 0; blocks < 64; ++blocks) {
    std::vector<bool> bits;
    for (std::size_t k = 0; k < kHidden.size(); ++k) bits.push_back((blocks >> k & 1) != 0);
    sets.emplace_back(plans.observe(recomputing(blocks)).most, cost_of(bits));
  }
  run_ranks(ranks, [&](int) {
    Blocks without;
    fsdp::fully_shard(*without, {.mesh = line(), .units = fsdp::each<Block>()});
    train(without, kSteps);
    const auto values = fsdp::handle(*without).full_parameters();
    std::int64_t before = 0;
    constexpr int kBudgets = 8;
    for (int k = 0; k < kBudgets; ++k) {
      const auto bytes = most - (most - least) * k / (kBudgets - 1);
      Blocks model;
      EXPECT_EQ(recomputed(model), std::vector<bool>(kHidden.size()));
      auto sharded = fsdp::fully_shard(*model, {.mesh = line(), .units = fsdp::each<Block>(), .memory_budget = budget_of(bytes)});
      const auto explained = fsdp::explain(*model);
      SCOPED_TRACE(explained);
      const auto blocks = recomputed(model);
      const auto cost = cost_of(blocks);
      auto best = std::numeric_limits<std::int64_t>::max();
      for (const auto& [needs, set_cost] : sets) best = needs <= bytes ? std::min(best, set_cost) : best;
      EXPECT_EQ(cost, best);
      EXPECT_GE(cost, before);
      before = cost;
      train(model, kSteps);
      Choice choice = recomputing(0);
      for (std::size_t b = 0; b < blocks.size(); ++b) {
        choice.recomputed[1 + b] = blocks[b];
        EXPECT_EQ(model->blocks[b]->forwards, (blocks[b] ? 2 : 1) * kSteps);
      }
      for (const auto& unit : sharded.engine()->units()) choice.kept.push_back(unit->options.kept_by_budget);
      const auto observed = plans.observe(choice);
      EXPECT_LE(observed.most, bytes);
      EXPECT_EQ(sharded.memory_stats().total.peak, observed.plan.memory.total.peak);
      EXPECT_EQ(sharded.wire_stats().all_gather_bytes, observed.plan.wire.all_gather_bytes);
      const auto says = cost == 0 ? std::string("no unit, because all activations fit")
                                  : "of 6 that may be), because without it prefetch_depth 1 needs " + std::to_string(most) + " bytes";
      EXPECT_NE(explained.find("recomputed in backward: "), std::string::npos);
      EXPECT_NE(explained.find(says), std::string::npos);
      const auto now = sharded.full_parameters();
      for (std::size_t i = 0; i < values.size(); ++i) EXPECT_TRUE(at::equal(now[i].second, values[i].second)) << values[i].first;
    }
    EXPECT_GT(before, 0);
  });
}

TEST(MemoryBudget, RecomputesTheFewestElementsOnTwoRanks) { expect_fewest_recompute(2); }
TEST(MemoryBudget, RecomputesTheFewestElementsOnFourRanks) { expect_fewest_recompute(4); }

TEST(MemoryBudget, PlansTheActivationsOfOneRecomputedUnitAtATime) {
  std::map<std::string, std::int64_t> at;
  for (const auto& [what, most] : planned(2).observe(recomputing(0b111111)).plan.moments) at[what] = most.activations;
  for (std::size_t k = 0; k < kHidden.size(); ++k) {
    const auto name = " of 'b" + std::to_string(k) + "'";
    const auto inputs = 500 * static_cast<std::int64_t>(k + 1);
    EXPECT_EQ(at["forward" + name], inputs);
    EXPECT_EQ(at["backward" + name], inputs - 500 + 1000 * kHidden[k]);
  }
  EXPECT_EQ(at["the update"], 0);
}

/// How gradients of several backwards add up.
enum class Adds { kReduced, kUnreduced, kNoSync, kLeft };

/// Three microbatches in each step from step `since` on. Returns the most that a rank has had.
std::int64_t accumulate(Blocks& model, Adds adds, int since) {
  auto sharded = fsdp::handle(*model);
  fsdp::AdamW optimizer(*model, {.lr = 1e-2});
  std::int64_t peak = 0;
  for (int step = 0; step < kSteps; ++step) {
    const int microbatches = step >= since ? 3 : 1;
    for (int k = 1; k <= microbatches; ++k) {
      const bool last = k == microbatches;
      if (adds == Adds::kUnreduced) sharded.set_requires_gradient_sync(last);
      if (adds == Adds::kLeft) sharded.set_is_last_backward(last);
      std::optional<fsdp::NoSync> no_sync;
      if (adds == Adds::kNoSync && !last) no_sync.emplace(*model);
      // Without a choice for it, a first backward that adds to reduced gradients is noticed afterwards.
      if (step > since || k > 1) sharded.reset_peak_memory_stats();
      model->forward(at::ones({2, 11})).sum().backward();
      if (step > since || adds == Adds::kUnreduced || adds == Adds::kNoSync) peak = std::max(peak, sharded.memory_stats().total.peak);
    }
    optimizer.step();
    optimizer.zero_grad();
  }
  return peak;
}

TEST(MemoryBudget, CountsGradientsThatAddUp) {
  run_ranks(2, [](int) {
    Bytes activations;
    const auto shard = [&activations](std::int64_t bytes, std::int64_t microbatches = 1, bool syncs = true) {
      Blocks model;
      const PlanOptions planned{.activations = activations, .microbatches = microbatches, .sync_each_microbatch = syncs};
      fsdp::fully_shard(*model,
                        {.mesh = line(), .units = fsdp::each<Block>(), .memory_budget = MemoryBudget{.bytes = bytes, .planned = planned}});
      return model;
    };
    const auto needs = [](const Blocks& model) {
      const auto text = fsdp::explain(*model);
      return std::stoll(text.substr(text.find("at most ") + 8));
    };
    for (const auto adds : {Adds::kReduced, Adds::kUnreduced, Adds::kNoSync, Adds::kLeft}) {
      SCOPED_TRACE(static_cast<int>(adds));
      const bool syncs = adds == Adds::kReduced || adds == Adds::kLeft;
      const auto least = [&](std::int64_t microbatches, bool reduces) {
        const auto text = message_of([&] { shard(1, microbatches, reduces); });
        return 1 + std::stoll(text.substr(text.find("too small by ") + 13));
      };
      // With them, most is needed at the end of a forward, when gradients of earlier backwards are there.
      activations = memory_budget_test::activations();
      EXPECT_GT(least(3, syncs), least(1, true));
      auto tight = shard(least(1, true));
      const auto refused = message_of([&] { accumulate(tight, adds, 1); });
      EXPECT_NE(refused.find("of gradients, those of several backwards add up"), std::string::npos) << refused;
      activations.clear();
      const auto bytes = least(3, syncs);
      int refusals = 0;
      for (const std::int64_t budget : {bytes, bytes + 2000, bytes + 8000, bytes + 100'000}) {
        for (const int since : {0, 2}) {
          for (const bool declares : {false, true}) {
            auto model = declares ? shard(budget, 3, syncs) : shard(budget);
            std::int64_t peak = 0;
            // Without a declaration, the optimizer's state may have stayed where it no longer fits.
            refusals += message_of([&] { peak = accumulate(model, adds, since); }) == "no error" ? 0 : 1;
            EXPECT_TRUE(peak > 0 || !declares || adds == Adds::kLeft);
            EXPECT_LE(peak, needs(model)) << fsdp::explain(*model);
            EXPECT_LE(needs(model), budget);
          }
        }
      }
      EXPECT_LE(refusals, 8);
    }
  });
}

TEST(MemoryBudget, PlansTheOrderThatStepsHaveRecorded) {
  run_ranks(2, [](int) {
    for (const std::vector<std::size_t>& order : {std::vector<std::size_t>{5, 1, 4, 0, 3, 2}, {0, 1, 2, 0, 1, 2, 3, 4, 5}}) {
      Blocks model;
      auto sharded = fsdp::fully_shard(*model, {.mesh = line(), .units = fsdp::each<Block>()});
      EXPECT_TRUE(fsdp::recorded_order(*model).forward.empty());
      fsdp::AdamW optimizer(*model, {.lr = 1e-2});
      for (int step = 0; step < kSteps; ++step) {
        sharded.reset_peak_memory_stats();
        sharded.reset_wire_stats();
        model->forward_by(order, at::ones({2, 11}, at::requires_grad())).sum().backward();
        optimizer.step();
        optimizer.zero_grad();
      }
      const auto recorded = fsdp::recorded_order(*model);
      std::vector<std::string> expected;
      for (const auto k : order) expected.push_back("b" + std::to_string(k));
      expected.emplace_back("(root)");
      EXPECT_EQ(recorded.forward, expected);
      std::ranges::reverse(expected);
      EXPECT_EQ(recorded.backward, expected);
      const FullyShardOptions options{.mesh = planned_device_mesh("cpu", {{"dp_shard", 2}}), .units = fsdp::each<Block>()};
      const auto plan = fsdp::plan(*Blocks(), options, {.order = recorded});
      EXPECT_EQ(plan.wire.all_gather_bytes, sharded.wire_stats().all_gather_bytes);
      EXPECT_EQ(plan.memory.gathered_parameters.peak, sharded.memory_stats().gathered_parameters.peak);
      EXPECT_NE(fsdp::plan(*Blocks(), options).wire.all_gather_bytes, plan.wire.all_gather_bytes);
    }
  });
}

/// A unit that uses a parameter of its own between units within it.
struct AroundImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return second(at::tanh(first(x)) * scale); }
  torch::nn::Linear first = register_module("first", torch::nn::Linear(11, 11));
  torch::nn::Linear second = register_module("second", torch::nn::Linear(11, 11));
  at::Tensor scale = register_parameter("scale", at::ones(11));
};
TORCH_MODULE(Around);

TEST(MemoryBudget, PlansOwnParametersAmongUnitsWithin) {
  run_ranks(2, [](int) {
    torch::nn::Sequential model(torch::nn::Linear(11, 11), Around());
    const auto units = [](const auto& name, const auto&) { return !name.empty(); };
    const auto plan = fsdp::plan(*model, {.mesh = planned_device_mesh("cpu", {{"dp_shard", 2}}), .units = units});
    auto sharded = fsdp::fully_shard(*model, {.mesh = line(), .units = units});
    fsdp::AdamW optimizer(*model, {});
    for (int step = 0; step < kSteps; ++step) {
      sharded.reset_peak_memory_stats();
      sharded.reset_wire_stats();
      model->forward(at::ones({3, 11})).sum().backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    EXPECT_GE(plan.memory.unreduced_gradients.peak, sharded.memory_stats().unreduced_gradients.peak);
    EXPECT_GE(plan.memory.total.peak, sharded.memory_stats().total.peak);
    EXPECT_EQ(plan.wire.all_gather_bytes, sharded.wire_stats().all_gather_bytes);
  });
}

TEST(MemoryBudget, RecomputesBeforeItGivesUpPrefetch) {
  const auto plans = planned(2);
  const auto all = plans.observe(recomputing(0b111111)).most;
  const auto all_without_prefetch = plans.observe(recomputing(0b111111, 0)).most;
  ASSERT_LT(all_without_prefetch, all);
  run_ranks(2, [&](int) {
    const auto explained = [](std::int64_t bytes) {
      Blocks model;
      fsdp::fully_shard(*model, {.mesh = line(), .units = fsdp::each<Block>(), .memory_budget = budget_of(bytes)});
      return fsdp::explain(*model);
    };
    EXPECT_NE(explained(all).find("prefetch_depth: 1, as given"), std::string::npos);
    const auto text = explained(all - 1);
    EXPECT_NE(text.find("prefetch_depth: 0, because prefetch_depth 1, all recomputed that may be needs " + std::to_string(all)),
              std::string::npos)
        << text;
  });
}

TEST(MemoryBudget, RefusesWhatCanNotBeRecomputed) {
  run_ranks(2, [](int rank) {
    const auto fails_with = [](const MemoryBudget& budget, const fsdp::UnitPredicate& units) {
      Blocks model;
      const auto message = message_of([&] { fsdp::fully_shard(*model, {.mesh = line(), .units = units, .memory_budget = budget}); });
      EXPECT_FALSE(fsdp::recomputes(*model->blocks[0]));
      fsdp::fully_shard(*model, {.mesh = line()});  // It was left as it was.
      return message;
    };
    const auto blocks = fsdp::each<Block>();
    EXPECT_EQ(fails_with({.bytes = 1 << 30, .recomputable = {{"x", 1}}}, blocks),
              "memory_budget: recomputable names unit 'x', which the model does not have");
    EXPECT_EQ(fails_with({.bytes = 1 << 30, .recomputable = {{"(root)", 1}}}, blocks),
              "memory_budget: recomputable names unit '(root)', which has units within it; name those");
    EXPECT_NE(fails_with({.bytes = 1 << 30, .recomputable = {{"b0", rank}}}, blocks).find("'b0' recomputable with 0"), std::string::npos);
    EXPECT_EQ(fails_with({.bytes = 1 << 30, .recomputable = {{"b0", -1}}}, blocks),
              "memory_budget: recomputable gives unit 'b0' -1 bytes; give 0 or more");
    EXPECT_EQ(fails_with({.bytes = 1 << 30, .planned = {.activations = {{"b1", -5}}}}, blocks),
              "memory_budget: activations gives unit 'b1' -5 bytes; give 0 or more");
    auto tight = budget_of(1);
    EXPECT_NE(fails_with(tight, blocks).find("even with prefetch_depth 0, all recomputed that may be and offload"), std::string::npos);
  });
}

TEST(MemoryBudget, IsAdjustedToMeasuredActivations) {
  const auto plans = planned(2);
  const auto bytes = plans.observe(recomputing(0)).most;
  run_ranks(2, [&](int rank) {
    Blocks model;
    EXPECT_NE(message_of([&] { fsdp::adjust_memory_budget(*model, 0); }).find("fully_shard"), std::string::npos);
    auto budget = budget_of(bytes);
    budget.planned.activations.clear();  // Nothing is known of them.
    auto sharded = fsdp::fully_shard(*model, {.mesh = line(), .units = fsdp::each<Block>(), .memory_budget = budget});
    const auto unknown = fsdp::explain(*model);
    train(model, 2);
    const auto kept = [&] {
      std::vector<bool> units;
      for (const auto& unit : sharded.engine()->units()) units.push_back(unit->options.kept_by_budget);
      return units;
    };
    EXPECT_EQ(std::ranges::count(kept(), true), 5) << unknown;
    // The largest that a rank gives counts.
    fsdp::adjust_memory_budget(*model, rank == 1 ? activations() : Bytes());
    const auto measured = fsdp::explain(*model);
    EXPECT_EQ(recomputed(model), std::vector<bool>(kHidden.size())) << measured;
    EXPECT_NE(measured.find("a step needs at most " + std::to_string(bytes) + " bytes"), std::string::npos) << measured;
    auto more = activations();
    more["b2"] += 40'000;
    fsdp::adjust_memory_budget(*model, more);
    EXPECT_EQ(std::ranges::count(recomputed(model), true), 1) << fsdp::explain(*model);
    EXPECT_EQ(message_of([&] { fsdp::adjust_memory_budget(*model, 6000); }).substr(0, 40), "adjust_memory_budget(): units recompute,");
    const int forwards = model->blocks[2]->forwards;
    train(model, 1);
    EXPECT_EQ(model->blocks[2]->forwards, forwards + 2);
    // What recomputes would free nothing of units that have no activations.
    const auto most = bytes * 6 / 10;
    fsdp::adjust_memory_budget(*model, {{"b1", most}, {"b3", most}});
    EXPECT_EQ(recomputed(model), (std::vector<bool>{false, true, false, false, false, false})) << fsdp::explain(*model);
    fsdp::adjust_memory_budget(*model, Bytes());
    // The largest activations that fit leave no room for a gather that is ahead.
    auto largest = bytes;
    while (message_of([&] { fsdp::adjust_memory_budget(*model, {{"b2", largest}}); }) != "no error") largest -= 256;
    EXPECT_NE(fsdp::explain(*model).find("prefetch_depth: 0, because"), std::string::npos) << fsdp::explain(*model);
    train(model, kSteps);
    auto choice = recomputing(0, /*prefetch_depth=*/0);
    choice.kept = kept();
    EXPECT_EQ(sharded.memory_stats().gathered_parameters.peak, plans.observe(choice).plan.memory.gathered_parameters.peak);
    choice.prefetch_depth = 1;
    EXPECT_LT(sharded.memory_stats().gathered_parameters.peak, plans.observe(choice).plan.memory.gathered_parameters.peak);
    fsdp::adjust_memory_budget(*model, Bytes());
    // The sum is divided among the units below the root.
    fsdp::adjust_memory_budget(*model, 6 * 1000);
    const auto by_sum = fsdp::explain(*model);
    Bytes equal;
    for (const auto& [name, count] : activations()) equal[name] = 1000;
    fsdp::adjust_memory_budget(*model, equal);
    EXPECT_EQ(fsdp::explain(*model), by_sum);
    // What can't be is refused on all ranks, and all is as it was.
    const auto before = kept();
    const auto refused = [&](const Bytes& given) {
      const auto message = message_of([&] { fsdp::adjust_memory_budget(*model, given); });
      EXPECT_EQ(fsdp::explain(*model), by_sum);
      EXPECT_EQ(kept(), before);
      return message;
    };
    const std::string other = "adjust_memory_budget(): another rank refuses the activations that it was given; see its error";
    EXPECT_EQ(refused(rank == 0 ? Bytes{{"x", 1}} : Bytes()), rank == 0 ? "adjust_memory_budget(): 'x' is no unit of the model" : other);
    EXPECT_EQ(refused(rank == 0 ? Bytes{{"b0", -1}} : Bytes()),
              rank == 0 ? "adjust_memory_budget(): activations of 'b0' are -1 bytes; give 0 or more" : other);
    EXPECT_EQ(refused({{"head", 1}}), "adjust_memory_budget(): 'head' is no unit of the model");  // It is in the root.
    EXPECT_NE(refused({{"b0", 10 * bytes}}).find("is too small by "), std::string::npos);
    fsdp::adjust_memory_budget(*model, Bytes());
    EXPECT_EQ(fsdp::explain(*model), unknown);
    train(model, 1);
    Blocks plain;
    fsdp::fully_shard(*plain, {.mesh = line()});
    EXPECT_EQ(message_of([&] { fsdp::adjust_memory_budget(*plain, 0); }),
              "adjust_memory_budget(): the model has no memory budget; give FullyShardOptions::memory_budget to fully_shard");
  });
}

}  // namespace memory_budget_test
