#include "fsdp/simulate.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/error.h"
#include "fsdp/fully_shard.h"
#include "gpt.h"
#include "support/messages.h"

namespace simulate_test {

using fsdp::Plan;
using fsdp::planned_device_mesh;
using fsdp::PlannedAction;
using fsdp::simulate;
using fsdp::Simulation;
using fsdp::SimulationOptions;
using What = PlannedAction::What;

Plan plan_of_gpt(const fsdp::DeviceMesh& mesh, fsdp::FullyShardOptions options = {}) {
  GPT model(GPTConfig{.vocab = 61, .dim = 20, .layers = 3, .heads = 2, .hidden = 37, .context = 8});
  options.mesh = mesh;
  options.units = fsdp::each<GPTBlock>();
  return fsdp::plan(*model, options);
}

/// What each rank does is followed one action at a time, in any order: a rank goes on as soon as it can.
class OneByOne {
 public:
  OneByOne(const Plan& plan, const SimulationOptions& options)
      : plan_(plan), options_(options), ranks_(static_cast<std::size_t>(plan.ranks)) {}

  std::vector<double> step_ms(std::mt19937& order) {
    std::vector<double> ms;
    double begin = 0;
    for (std::int64_t step = 0; step < options_.steps; ++step) {
      for (auto& rank : ranks_) rank.next = 0;
      std::vector<std::size_t> left(ranks_.size());
      std::iota(left.begin(), left.end(), 0);
      while (!left.empty()) {
        std::shuffle(left.begin(), left.end(), order);
        std::erase_if(left, [&](std::size_t rank) { return !goes_on(rank, step); });
      }
      double end = 0;
      for (const auto& rank : ranks_) end = std::max(end, rank.now);
      ms.push_back(end - std::exchange(begin, end));
    }
    return ms;
  }

 private:
  struct Rank {
    double now = 0;
    std::size_t next = 0;
  };
  struct Collective {
    std::size_t there = 0;
    double latest = 0;
    double end = -1;
  };

  /// The first rank of a rank's row, by its coordinate in the row's dimension.
  std::int64_t first_of(std::size_t rank, const fsdp::PlannedLink& link) const {
    const auto number = static_cast<std::int64_t>(rank);
    const auto coordinate = number / link.stride % link.ranks;
    return number - coordinate * link.stride;
  }

  bool goes_on(std::size_t number, std::int64_t step) {
    auto& rank = ranks_[number];
    if (rank.next == plan_.actions.size()) return false;
    const auto& action = plan_.actions[rank.next];
    const auto named = [](const auto& values, const std::string& name) {
      const auto found = values.find(name);
      return found == values.end() ? typename std::remove_cvref_t<decltype(values)>::mapped_type() : found->second;
    };
    if (action.what == What::kUpdate) rank.now += options_.update_ms * factor(number);
    if (action.what == What::kCompute) {
      const auto time = named(options_.units, plan_.units[action.unit].name);
      rank.now += action.share * (action.in_backward ? time.backward_ms : time.forward_ms) * factor(number);
      if (options_.delay_ms) {
        rank.now += action.share * options_.delay_ms(static_cast<std::int64_t>(number), step, action.unit, action.in_backward);
      }
    }
    if (action.what == What::kPost || action.what == What::kWait) {
      const auto& link = plan_.links[action.link];
      const auto row = first_of(number, link);
      auto& collective = collectives_[{step, action.number, row}];
      if (action.what == What::kPost) {
        collective.latest = std::max(collective.latest, rank.now);
        if (++collective.there == static_cast<std::size_t>(link.ranks)) {
          const auto rate = named(options_.links, link.dim);
          auto& free = free_[{action.queue, row}];
          free = std::max(free, collective.latest) + rate.latency_us / 1e3 +
                 (rate.bytes_per_s > 0 ? static_cast<double>(action.bytes) / rate.bytes_per_s * 1e3 : 0);
          collective.end = free;
        }
      } else {
        if (collective.end < 0) return true;  // Others are not there yet.
        rank.now = std::max(rank.now, collective.end);
      }
    }
    ++rank.next;
    return true;
  }

  double factor(std::size_t rank) const {
    const auto found = options_.slow_ranks.find(static_cast<std::int64_t>(rank));
    return found == options_.slow_ranks.end() ? 1.0 : found->second;
  }

  const Plan& plan_;
  const SimulationOptions& options_;
  std::vector<Rank> ranks_;
  std::map<std::tuple<std::int64_t, std::size_t, std::int64_t>, Collective> collectives_;
  std::map<std::pair<std::size_t, std::int64_t>, double> free_;
};

/// Collectives are begun by all ranks of a row in the same order, as each rank has the same actions; a row may begin one before another row
/// has begun the one before it.
TEST(Simulate, IsWhatRanksDoOneByOne) {
  std::mt19937 random(7);
  const std::vector<std::pair<fsdp::DeviceMesh, fsdp::FullyShardOptions>> cases = {
      {planned_device_mesh("cpu", {{"dp_shard", 4}}), {}},
      {planned_device_mesh("cuda", {{"dp_shard", 8}}, {.ranks_per_host = 4}), {.prefetch_depth = 0}},
      {planned_device_mesh("cuda", {{"dp_outer", 3}, {"dp_shard", 4}}), {.prefetch_depth = 2, .separate_reduce_group = true}},
      {planned_device_mesh("cuda", {{"dp_outer", 2}, {"dp_shard", 4}}), {.outer_placements = fsdp::Placements::optim()}},
      {planned_device_mesh("cuda", {{"dp_shard", 8}}), {.reshard_after_forward_size = 2}},
  };
  for (std::size_t k = 0; k < cases.size(); ++k) {
    const auto plan = plan_of_gpt(cases[k].first, cases[k].second);
    for (int trial = 0; trial < 5; ++trial) {
      std::uniform_real_distribution<double> drawn(0, 2);
      SimulationOptions options{.update_ms = drawn(random)};
      for (const auto& unit : plan.units) options.units[unit.name] = {.forward_ms = drawn(random), .backward_ms = drawn(random)};
      for (const auto& link : plan.links) options.links[link.dim] = {.latency_us = 500 * drawn(random), .bytes_per_s = 1e7 * drawn(random)};
      for (int slow = 0; slow < trial; ++slow) options.slow_ranks[static_cast<std::int64_t>(random()) % plan.ranks] = drawn(random);
      if (trial == 0) {  // Now one rank is late, and now another.
        options.delay_ms = [](std::int64_t rank, std::int64_t step, std::size_t unit, bool in_backward) {
          const auto number = 7919 * rank + 104'729 * step + 1'299'709 * static_cast<std::int64_t>(unit) + (in_backward ? 31 : 0);
          return static_cast<double>(number % 97) / 20;
        };
      }
      const auto simulated = simulate(plan, options);
      const auto expected = OneByOne(plan, options).step_ms(random);
      ASSERT_EQ(simulated.step_ms.size(), expected.size());
      for (std::size_t step = 0; step < expected.size(); ++step) {
        EXPECT_NEAR(simulated.step_ms[step], expected[step], 1e-9) << k << " " << trial << " " << step;
      }
    }
  }
}

TEST(Simulate, ActionsAreThoseOfThePlan) {
  const auto plan = plan_of_gpt(planned_device_mesh("cuda", {{"dp_outer", 2}, {"dp_shard", 4}}));
  std::map<std::pair<std::size_t, bool>, double> shares;
  std::vector<bool> waited;
  std::int64_t bytes = 0;
  std::vector<std::int64_t> posts(plan.links.size());
  int updates = 0;
  for (const auto& action : plan.actions) {
    if (action.what == What::kCompute) shares[{action.unit, action.in_backward}] += action.share;
    if (action.what == What::kUpdate) ++updates;
    if (action.what == What::kPost) {
      EXPECT_EQ(action.number, waited.size());
      waited.push_back(false);
      bytes += action.bytes;
      ++posts[action.link];
    }
    if (action.what == What::kWait) {
      ASSERT_LT(action.number, waited.size());
      EXPECT_FALSE(waited[action.number]);
      waited[action.number] = true;
    }
  }
  EXPECT_EQ(updates, 1);
  EXPECT_EQ(bytes, plan.wire.all_gather_bytes + plan.wire.reduce_scatter_bytes);
  for (std::size_t k = 0; k < plan.links.size(); ++k)
    EXPECT_EQ(posts[k], plan.links[k].sent.all_gathers + plan.links[k].sent.reduce_scatters);
  EXPECT_EQ(std::count(waited.begin(), waited.end(), false), 0);
  for (std::size_t unit = 0; unit < plan.units.size(); ++unit) {
    EXPECT_DOUBLE_EQ((shares[{unit, false}]), 1) << unit;
    EXPECT_DOUBLE_EQ((shares[{unit, true}]), 1) << unit;
  }
}

SimulationOptions times_of(const Plan& plan) {
  SimulationOptions options{.update_ms = 1};
  for (const auto& unit : plan.units) options.units[unit.name] = {.forward_ms = 2, .backward_ms = 4};
  return options;
}

TEST(Simulate, StepOfEqualRanksIsTheirComputation) {
  const auto plan = plan_of_gpt(planned_device_mesh("cuda", {{"dp_shard", 4}}));
  const auto simulated = simulate(plan, times_of(plan));
  EXPECT_NEAR(simulated.average_ms(), 4 * 6 + 1, 1e-9);
  EXPECT_NEAR(simulated.compute_ms, 4 * 6 + 1, 1e-9);
  EXPECT_EQ(simulated.exposed_ms, 0);
}

TEST(Simulate, PrefetchHidesGathers) {
  const auto mesh = planned_device_mesh("cuda", {{"dp_shard", 4}});
  std::vector<double> exposed;
  for (const int depth : {0, 1}) {
    const auto plan = plan_of_gpt(mesh, {.prefetch_depth = depth});
    auto options = times_of(plan);
    options.links["dp_shard"] = {.latency_us = 500};
    const auto simulated = simulate(plan, options);
    EXPECT_NEAR(simulated.step_ms.back(), simulated.compute_ms + simulated.exposed_ms, 1e-9);
    exposed.push_back(simulated.exposed_ms);
    double sum = 0;
    for (const auto& [unit, ms] : simulated.exposed_by_unit_ms) sum += ms;
    EXPECT_NEAR(sum, simulated.exposed_ms, 1e-9);
  }
  EXPECT_GT(exposed[0], exposed[1] + 1);
}

TEST(Simulate, OneSlowRankSlowsAll) {
  const auto plan = plan_of_gpt(planned_device_mesh("cuda", {{"dp_outer", 2}, {"dp_shard", 4}}));
  auto options = times_of(plan);
  options.slow_ranks[5] = 1.5;
  const auto simulated = simulate(plan, options);
  EXPECT_NEAR(simulated.average_ms(), 1.5 * 25, 1.5 * 4 + 1);  // The last unit's update does not wait.
  EXPECT_GT(simulated.exposed_ms, 5);
}

TEST(Simulate, OneRankStandsForAllThatAreAlike) {
  const auto plan = plan_of_gpt(planned_device_mesh("cuda", {{"dp_outer", 2}, {"dp_shard", 4}}));
  auto options = times_of(plan);
  for (const auto& link : plan.links) options.links[link.dim] = {.latency_us = 900, .bytes_per_s = 1e8};
  const auto one = simulate(plan, options);
  options.slow_ranks[3] = 1.0;
  const auto all = simulate(plan, options);
  EXPECT_NEAR(one.average_ms(), all.average_ms(), 1e-9);
  EXPECT_NEAR(one.compute_ms, all.compute_ms, 1e-9);
  EXPECT_NEAR(one.exposed_ms, all.exposed_ms, 1e-9);
  EXPECT_GT(one.exposed_ms, 1);
}

TEST(Simulate, WhatIsDrawnDependsOnTheSeed) {
  const auto plan = plan_of_gpt(planned_device_mesh("cuda", {{"dp_shard", 64}}));
  auto options = times_of(plan);
  options.jitter = 0.2;
  const auto first = simulate(plan, options);
  EXPECT_EQ(simulate(plan, options).step_ms, first.step_ms);
  EXPECT_GT(first.average_ms(), 25);  // The latest of many ranks counts.
  options.seed = 1;
  EXPECT_NE(simulate(plan, options).step_ms, first.step_ms);
}

TEST(Simulate, DelaysAreAdded) {
  const auto plan = plan_of_gpt(planned_device_mesh("cuda", {{"dp_shard", 2}}));
  auto options = times_of(plan);
  options.delay_ms = [&](std::int64_t rank, std::int64_t step, std::size_t unit, bool in_backward) {
    return rank == 1 && step == 1 && plan.units[unit].name == "blocks.1" && in_backward ? 20.0 : 0.0;
  };
  const auto simulated = simulate(plan, options);
  EXPECT_NEAR(simulated.step_ms[0], 25, 1e-9);
  EXPECT_NEAR(simulated.step_ms[1], 45, 1e-9);
  EXPECT_NEAR(simulated.step_ms[2], 25, 1e-9);
}

TEST(Simulate, BadOptionsAreErrors) {
  const auto plan = plan_of_gpt(planned_device_mesh("cuda", {{"dp_shard", 2}}));
  const auto says = [&](const std::string& text, const SimulationOptions& options) {
    const auto message = fsdp::testing::message_of<fsdp::Error>([&] { simulate(plan, options); });
    EXPECT_NE(message.find(text), std::string::npos) << message;
  };
  says("no unit 'blocks.9'; it has '(root)', 'blocks.0'", {.units = {{"blocks.9", {}}}});
  says("no link 'dp'; it has 'dp_shard'", {.links = {{"dp", {}}}});
  constexpr auto kInfinite = std::numeric_limits<double>::infinity();
  for (const double wrong : {-1.0, std::nan(""), kInfinite}) {
    const auto is_wrong = " is " + std::to_string(wrong) + "; give a finite number, 0 or more";
    says("forward_ms of unit 'blocks.1'" + is_wrong, {.units = {{"blocks.1", {.forward_ms = wrong}}}});
    says("backward_ms of unit 'blocks.1'" + is_wrong, {.units = {{"blocks.1", {.backward_ms = wrong}}}});
    says("latency_us of link 'dp_shard'" + is_wrong, {.links = {{"dp_shard", {.latency_us = wrong}}}});
    says("bytes_per_s of link 'dp_shard'" + is_wrong, {.links = {{"dp_shard", {.bytes_per_s = wrong}}}});
    says("the factor of rank 1" + is_wrong, {.slow_ranks = {{1, wrong}}});
    says("update_ms" + is_wrong, {.update_ms = wrong});
    says("jitter" + is_wrong, {.jitter = wrong});
  }
  says("delay_ms of rank 0 is inf", {.delay_ms = [](auto...) { return kInfinite; }});
  says("there is no rank 2 of 2", {.slow_ranks = {{2, 1.5}}});
  says("steps is 0; give 1 or more", {.steps = 0});
  says("no times are given", {.units = {{"blocks.1", {}}}, .slow_ranks = {{1, 2}}});
}

}  // namespace simulate_test
