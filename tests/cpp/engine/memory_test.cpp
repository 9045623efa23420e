// Live and peak bytes against what shapes and the documented schedule predict, to the byte.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "fsdp/fsdp.h"
#include "support/multi_rank.h"
#include "support/predicted_memory.h"
#include "support/reference.h"
#include "support/stack.h"

namespace memory_test {

using fsdp::MemoryStats;
using fsdp::Placement;
using fsdp::Placements;
using fsdp::testing::all_strategies;
using fsdp::testing::line;
using fsdp::testing::LiveBytes;
using fsdp::testing::make_stack;
using fsdp::testing::PredictedStep;
using fsdp::testing::run_ranks;
using fsdp::testing::ScheduleModel;
using fsdp::testing::stack_loss;
using fsdp::testing::stack_units;
using fsdp::testing::StackOptions;
using fsdp::testing::unit_table;
using fsdp::testing::UnitTable;

struct Config {
  std::string strategy = "optim_grads_params";
  int prefetch_depth = 1;
  bool reshard_after_forward = true;
  StackOptions model = {};
  bool freeze = false;  ///< One block whole, and a part of another.

  std::string text() const {
    return strategy + ", prefetch_depth " + std::to_string(prefetch_depth) + (reshard_after_forward ? "" : ", no reshard") +
           (model.nested ? ", nested" : "") + (freeze ? ", frozen" : "");
  }
};

fsdp::testing::Stack make_model(const Config& config) {
  auto model = make_stack(config.model);
  if (config.freeze) {
    for (auto& item : model->named_parameters()) {
      if (item.key().starts_with("blocks.1.") || item.key() == "blocks.2.down.weight" || item.key() == "entry.bias") {
        item.value().requires_grad_(false);
      }
    }
  }
  return model;
}

std::vector<std::string> unit_names(const StackOptions& options) {
  std::vector<std::string> names = {""};
  for (std::size_t k = 0; k < options.hidden.size(); ++k) {
    const auto block = "blocks." + std::to_string(k);
    names.push_back(block);
    if (options.nested) names.insert(names.end(), {block + ".first", block + ".second"});
  }
  return names;
}

/// What Stack::forward and its backward touch, in order.
class StackScript {
 public:
  StackScript(const Config& config, UnitTable units, const fsdp::DeviceMesh& mesh)
      : blocks_(config.model.hidden.size()),
        nested_(config.model.nested),
        units_(units),
        model(std::move(units), mesh.size(), Placements::from_name(config.strategy), config.reshard_after_forward, config.prefetch_depth) {
    model.staged = mesh.communicator("dp_shard")->staging_numel(1) > 0;
  }

  void forward() {
    model.begin_step();
    model.touch("");
    for (std::size_t k = 0; k < blocks_; ++k) {
      const auto block = "blocks." + std::to_string(k);
      if (nested_) {
        model.touch(block);
        compute("forward", block + ".first");
        compute("forward", block + ".second");
      } else {
        compute("forward", block);
      }
      if (nested_) model.touch(block);
    }
    model.touch("");
    model.mark("after forward");
  }

  void backward() {
    model.begin_backward_pass();
    model.touch("");
    model.gradient("");
    for (std::size_t k = blocks_; k-- > 0;) {
      const auto block = "blocks." + std::to_string(k);
      if (nested_) {
        model.touch(block);
        compute("backward", block + ".second");
        compute("backward", block + ".first");
        model.gradient(block);
      } else {
        compute("backward", block);
      }
    }
    model.end_backward();
    model.mark("after backward");
  }

 private:
  void compute(const std::string& pass, const std::string& unit) {
    model.mark(pass + " " + unit);
    model.touch(unit);
    if (pass == "backward" && trainable(unit)) model.gradient(unit);
  }

  bool trainable(const std::string& unit) const {
    for (const auto& [name, bytes] : units_) {
      if (name == unit) return bytes.trainable_full > 0;
    }
    return false;
  }

  std::size_t blocks_;
  bool nested_;
  UnitTable units_;

 public:
  ScheduleModel model;
};

struct SteadyBytes {
  std::int64_t main_parameters = 0;
  std::int64_t optimizer_state = 0;
  std::int64_t sum() const { return main_parameters + optimizer_state; }
};

/// What stays from step to step, once AdamW has run.
SteadyBytes steady_bytes(const UnitTable& units, const Placements& placements, std::int64_t ranks) {
  SteadyBytes bytes;
  for (const auto& [name, unit] : units) {
    // Replicas are the gathered parameters. A rank that is alone has no other parameters than the main ones.
    if (placements.parameters == Placement::kSharded || ranks == 1) bytes.main_parameters += unit.shard;
    bytes.optimizer_state += 2 * (placements.optimizer == Placement::kSharded ? unit.trainable_shard : unit.trainable_full);
  }
  return bytes;
}

void expect_live(const MemoryStats& stats, const SteadyBytes& steady, const LiveBytes& live, const std::string& moment) {
  EXPECT_EQ(stats.main_parameters.live, steady.main_parameters) << moment;
  EXPECT_EQ(stats.main_gradients.live, live.main_gradients) << moment;
  EXPECT_EQ(stats.optimizer_state.live, steady.optimizer_state) << moment;
  EXPECT_EQ(stats.gathered_parameters.live, live.gathered) << moment;
  EXPECT_EQ(stats.unreduced_gradients.live, live.unreduced) << moment;
  EXPECT_EQ(stats.communication.live, live.staging) << moment;
  EXPECT_EQ(stats.total.live, steady.sum() + live.sum()) << moment;
}

void expect_peak(const MemoryStats& stats, const SteadyBytes& steady, const PredictedStep& step, const std::string& what) {
  EXPECT_EQ(stats.main_gradients.peak, step.peak.main_gradients) << what;
  EXPECT_EQ(stats.gathered_parameters.peak, step.peak.gathered) << what;
  EXPECT_EQ(stats.unreduced_gradients.peak, step.peak.unreduced) << what;
  EXPECT_EQ(stats.communication.peak, step.peak.staging) << what;
  EXPECT_EQ(stats.total.peak, steady.sum() + step.peak_sum) << what;
}

/// Whole units for ever, or nothing.
LiveBytes at_rest(const UnitTable& units, const Placements& placements, std::int64_t ranks) {
  LiveBytes live;
  for (const auto& [name, unit] : units) {
    if (placements.parameters == Placement::kReplicated && ranks > 1) live.gathered += unit.full;
  }
  return live;
}

void expect_predicted_memory(const fsdp::DeviceMesh& mesh, const Config& config) {
  SCOPED_TRACE(config.text());
  const auto placements = Placements::from_name(config.strategy);
  auto model = make_model(config);
  const auto units = unit_table(*model, unit_names(config.model), mesh.size());
  auto sharded = fsdp::fully_shard(*model, {.mesh = mesh,
                                            .units = stack_units(),
                                            .placements = placements,
                                            .reshard_after_forward = config.reshard_after_forward,
                                            .prefetch_depth = config.prefetch_depth});
  expect_live(sharded.memory_stats(), {.main_parameters = steady_bytes(units, placements, mesh.size()).main_parameters},
              at_rest(units, placements, mesh.size()), "after fully_shard");
  fsdp::AdamW optimizer(*model);
  StackScript script(config, units, mesh);
  const auto steady = steady_bytes(units, placements, mesh.size());
  constexpr int kWarmUp = 2;
  for (int step = 0; step <= kWarmUp; ++step) {
    const bool measured = step == kWarmUp;
    std::map<std::string, MemoryStats> seen;
    if (measured) {
      model->observer = [&](const std::string& event) { seen[event] = sharded.memory_stats(); };
      sharded.reset_peak_memory_stats();
    }
    script.forward();
    const auto loss = stack_loss(model, step, mesh.rank());
    seen["after forward"] = sharded.memory_stats();
    script.backward();
    loss.backward();
    seen["after backward"] = sharded.memory_stats();
    if (measured) {
      ASSERT_EQ(seen.size(), script.model.step().live.size());
      for (const auto& [moment, live] : script.model.step().live) {
        ASSERT_TRUE(seen.contains(moment)) << moment;
        expect_live(seen.at(moment), steady, live, moment);
      }
      expect_peak(seen.at("after backward"), steady, script.model.step(), "peak of the step");
    }
    optimizer.step();
    if (measured) expect_live(sharded.memory_stats(), steady, script.model.step().live.at("after backward"), "after step");
    optimizer.zero_grad();
    script.model.zero_grad();
    if (measured) expect_live(sharded.memory_stats(), steady, at_rest(units, placements, mesh.size()), "after zero_grad");
  }
  const auto stats = sharded.memory_stats();
  EXPECT_GE(stats.slots.peak, script.model.step().peak_slots > 0 ? 1 : 0);
  EXPECT_LE(stats.slots.peak, static_cast<std::int64_t>(script.model.step().peak_slots) * script.model.step().largest_slot);
}

class Memory : public ::testing::TestWithParam<int> {};

TEST_P(Memory, EqualsThePrediction) {
  run_ranks(GetParam(), [] {
    const auto mesh = line();
    for (const auto& strategy : all_strategies()) {
      for (const int prefetch_depth : {0, 1, 2}) {
        for (const bool reshard : {true, false}) {
          for (const bool nested : {false, true}) {
            // Replicas stay in any case: half of the combinations will do.
            if (strategy != "optim_grads_params" && (nested || prefetch_depth == 1) == !reshard) continue;
            expect_predicted_memory(
                mesh,
                {.strategy = strategy, .prefetch_depth = prefetch_depth, .reshard_after_forward = reshard, .model = {.nested = nested}});
          }
        }
      }
    }
  });
}

TEST_P(Memory, FrozenParametersHaveNoGradients) {
  run_ranks(GetParam(), [] {
    for (const bool shared : {true, false}) {
      const auto mesh = fsdp::init_device_mesh("cpu", {{"dp_shard", -1}}, {.shared_memory = shared});
      for (const auto& strategy : all_strategies()) expect_predicted_memory(mesh, {.strategy = strategy, .freeze = true});
    }
  });
}

// Backward without reduction keeps a whole gradient for each unit; the next one with reduction gives them back one by one.
TEST_P(Memory, AccumulationWithoutSyncHoldsWholeGradients) {
  run_ranks(GetParam(), [] {
    const auto mesh = line();
    for (const auto& strategy : all_strategies()) {
      const Config config{.strategy = strategy};
      SCOPED_TRACE(config.text());
      const auto placements = Placements::from_name(strategy);
      auto model = make_model(config);
      const auto units = unit_table(*model, unit_names(config.model), mesh.size());
      auto sharded = fsdp::fully_shard(*model, {.mesh = mesh, .units = stack_units(), .placements = placements});
      StackScript script(config, units, mesh);
      auto steady = steady_bytes(units, placements, mesh.size());
      steady.optimizer_state = 0;
      std::int64_t all_gradients = 0;
      for (const auto& [name, unit] : units) all_gradients += unit.trainable_full;
      for (int step = 0; step < 2; ++step) {
        for (const bool sync : {false, false, true}) {
          sharded.reset_peak_memory_stats();
          sharded.set_requires_gradient_sync(sync);
          script.model.sync = sync;
          script.forward();
          const auto loss = stack_loss(model, step, mesh.rank());
          script.backward();
          loss.backward();
          expect_live(sharded.memory_stats(), steady, script.model.step().live.at("after backward"),
                      sync ? "after the last backward" : "after a backward without sync");
          EXPECT_EQ(sharded.memory_stats().unreduced_gradients.peak,
                    placements.gradients == Placement::kSharded && mesh.size() > 1 ? all_gradients : 0);
          if (step > 0) expect_peak(sharded.memory_stats(), steady, script.model.step(), sync ? "with sync" : "without sync");
        }
        sharded.zero_grad();
        script.model.zero_grad();
      }
    }
  });
}

// With reduction each time, the second gradient can't be collected where the first result lies.
TEST_P(Memory, AccumulationWithSync) {
  run_ranks(GetParam(), [] {
    const auto mesh = line();
    for (const auto& strategy : all_strategies()) {
      const Config config{.strategy = strategy};
      SCOPED_TRACE(config.text());
      auto model = make_model(config);
      const auto units = unit_table(*model, unit_names(config.model), mesh.size());
      auto sharded = fsdp::fully_shard(*model, {.mesh = mesh, .units = stack_units(), .placements = Placements::from_name(strategy)});
      StackScript script(config, units, mesh);
      auto steady = steady_bytes(units, Placements::from_name(strategy), mesh.size());
      steady.optimizer_state = 0;
      for (int step = 0; step < 3; ++step) {
        for (int part = 0; part < 2; ++part) {
          sharded.reset_peak_memory_stats();
          script.forward();
          const auto loss = stack_loss(model, step, mesh.rank());
          script.backward();
          loss.backward();
          if (step > 0) expect_peak(sharded.memory_stats(), steady, script.model.step(), "part " + std::to_string(part));
        }
        sharded.zero_grad();
        script.model.zero_grad();
      }
    }
  });
}

MemoryStats peaks_of(const fsdp::DeviceMesh& mesh, const Config& config, int steps = 4) {
  auto model = make_model(config);
  auto sharded = fsdp::fully_shard(*model, {.mesh = mesh,
                                            .units = stack_units(),
                                            .placements = Placements::from_name(config.strategy),
                                            .reshard_after_forward = config.reshard_after_forward,
                                            .prefetch_depth = config.prefetch_depth});
  fsdp::AdamW optimizer(*model);
  for (int step = 0; step < steps; ++step) {
    if (step == steps - 1) sharded.reset_peak_memory_stats();
    stack_loss(model, step, mesh.rank()).backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  return sharded.memory_stats();
}

// Of models of more than a few units: with few, the two live gradients of ZeRO-2 can be more than what it saves.
TEST_P(Memory, EachStrategyPeaksBelowTheOneBefore) {
  run_ranks(GetParam(), [] {
    const auto mesh = line();
    Config config{.model = {.width = 16, .hidden = std::vector<std::int64_t>(12, 32)}};
    std::map<std::string, MemoryStats> peaks;
    for (const auto& strategy : all_strategies()) {
      config.strategy = strategy;
      peaks[strategy] = peaks_of(mesh, config);
    }
    if (mesh.size() == 1) {
      // Nothing to share: the main parameters and gradients are whole.
      EXPECT_EQ(peaks["optim"].total.peak, peaks["no_shard"].total.peak);
      EXPECT_EQ(peaks["optim_grads"].total.peak, peaks["optim"].total.peak);
      return;
    }
    EXPECT_LT(peaks["optim"].total.peak, peaks["no_shard"].total.peak);
    EXPECT_LT(peaks["optim_grads"].total.peak, peaks["optim"].total.peak);
    EXPECT_LT(peaks["optim_grads_params"].total.peak, peaks["optim_grads"].total.peak);
  });
}

TEST_P(Memory, OnlyReadAheadAndKeptUnitsCostMore) {
  run_ranks(GetParam(), [] {
    const auto mesh = line();
    const StackOptions model{.width = 16, .hidden = std::vector<std::int64_t>(6, 32)};
    auto probe = make_stack(model);
    const auto units = unit_table(*probe, unit_names(model), mesh.size());
    const auto root = units[0].second.full;
    const auto block = units[1].second.full;
    for (const int depth : {0, 1, 2}) {
      if (mesh.size() == 1) continue;  // Nothing is gathered: alone_test.cpp.
      EXPECT_EQ(peaks_of(mesh, {.prefetch_depth = depth, .model = model}).gathered_parameters.peak, root + (1 + depth) * block);
      EXPECT_EQ(peaks_of(mesh, {.prefetch_depth = depth, .reshard_after_forward = false, .model = model}).gathered_parameters.peak,
                root + 6 * block);
    }
  });
}

// The first step knows no order: it gathers unit by unit, and still holds no more than the later ones.
TEST_P(Memory, TheFirstStepPeaksNoHigherThanTheOthers) {
  run_ranks(GetParam(), [] {
    const auto mesh = line();
    for (const auto& strategy : all_strategies()) {
      const auto first = peaks_of(mesh, {.strategy = strategy}, 1);
      const auto later = peaks_of(mesh, {.strategy = strategy}, 4);
      EXPECT_LE(first.gathered_parameters.peak, later.gathered_parameters.peak) << strategy;
      EXPECT_EQ(first.unreduced_gradients.peak, later.unreduced_gradients.peak) << strategy;
      EXPECT_EQ(first.communication.peak, later.communication.peak) << strategy;
      EXPECT_LE(first.total.peak, later.total.peak) << strategy;
    }
  });
}

TEST_P(Memory, NothingIsAllocatedInTheSteadyState) {
  run_ranks(GetParam(), [] {
    const auto mesh = line();
    for (const auto& strategy : all_strategies()) {
      for (const bool nested : {false, true}) {
        for (const int depth : {0, 1, 2}) {
          if (depth != 1 && strategy != "optim_grads_params") continue;  // nothing else is gathered into slots
          const Config config{.strategy = strategy, .prefetch_depth = depth, .model = {.nested = nested}};
          SCOPED_TRACE(config.text());
          auto model = make_model(config);
          auto sharded = fsdp::fully_shard(
              *model, {.mesh = mesh, .units = stack_units(), .placements = Placements::from_name(strategy), .prefetch_depth = depth});
          fsdp::AdamW optimizer(*model);
          std::int64_t allocations = 0;
          for (int step = 0; step < 7; ++step) {
            stack_loss(model, step, mesh.rank()).backward();
            optimizer.step();
            optimizer.zero_grad();
            if (step == 3) allocations = sharded.memory_stats().slot_allocations;
          }
          EXPECT_EQ(sharded.memory_stats().slot_allocations, allocations);
        }
      }
    }
  });
}

TEST_P(Memory, ValidationSkippedLayersAndNewOrdersStayBounded) {
  run_ranks(GetParam(), [] {
    const auto mesh = line();
    for (const auto& strategy : all_strategies()) {
      const Config config{.strategy = strategy};
      SCOPED_TRACE(config.text());
      auto model = make_model(config);
      const auto units = unit_table(*model, unit_names(config.model), mesh.size());
      auto sharded = fsdp::fully_shard(*model, {.mesh = mesh, .units = stack_units(), .placements = Placements::from_name(strategy)});
      fsdp::AdamW optimizer(*model);
      const auto train = [&](std::int64_t step, std::vector<std::size_t> order = {}) {
        stack_loss(model, step, mesh.rank(), std::move(order)).backward();
        optimizer.step();
        optimizer.zero_grad();
      };
      const auto disturb = [&](std::int64_t step) {
        {
          const torch::NoGradGuard no_grad;
          for (int pass = 0; pass < 3; ++pass) stack_loss(model, step, mesh.rank());
        }
        train(step);
        train(step, {0, 2, 3});
        train(step, {3, 1, 0, 2});
        train(step, {1, 0, 1, 3, 1});
        stack_loss(model, step, mesh.rank());  // a graph that nobody goes back through
        train(step);
      };
      for (int step = 0; step < 3; ++step) train(step);
      const auto usual = sharded.memory_stats();
      for (int round = 0; round < 3; ++round) disturb(round);
      const auto disturbed = sharded.memory_stats();
      for (int round = 0; round < 3; ++round) disturb(round);
      for (int step = 0; step < 6; ++step) train(step);
      const auto calm = sharded.memory_stats();
      for (int step = 0; step < 3; ++step) train(step);
      const auto last = sharded.memory_stats();
      // Plans come and go with the disturbance; the memory does not grow by it, and what is usual again allocates nothing.
      EXPECT_LE(calm.slots.live, disturbed.slots.live);
      EXPECT_EQ(last.slot_allocations, calm.slot_allocations);
      EXPECT_EQ(last.slots.live, calm.slots.live);
      EXPECT_EQ(last.gathered_parameters.live, usual.gathered_parameters.live);

      // Never more at once than the root, the current unit and one read ahead; the root's gradient and two others; their staging.
      std::int64_t root = units[0].second.full;
      std::int64_t largest = 0;
      for (const auto& [name, unit] : units) largest = std::max(largest, unit.full);
      EXPECT_TRUE(strategy != "optim_grads_params" || last.gathered_parameters.peak <= root + 2 * largest);
      EXPECT_LE(last.unreduced_gradients.peak, root + 2 * largest);
      EXPECT_LE(last.communication.peak, root + 3 * largest);
      EXPECT_LE(last.slots.peak, 10 * largest);
    }
  });
}

TEST_P(Memory, AModelThatGoesGivesItsMemoryBack) {
  run_ranks(GetParam(), [] {
    const auto mesh = line();
    auto model = make_stack();
    auto sharded = fsdp::fully_shard(*model, {.mesh = mesh, .units = stack_units()});
    const auto before = sharded.memory_stats();
    {
      fsdp::AdamW optimizer(*model);
      stack_loss(model, 0, mesh.rank()).backward();
      optimizer.step();
      EXPECT_GT(sharded.memory_stats().optimizer_state.live, 0);
    }
    EXPECT_EQ(sharded.memory_stats().optimizer_state.live, 0);
    EXPECT_EQ(sharded.memory_stats().gathered_parameters.live, before.gathered_parameters.live);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Memory, ::testing::Values(1, 2, 4), [](const auto& info) { return std::to_string(info.param); });

}  // namespace memory_test
