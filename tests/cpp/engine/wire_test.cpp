// Bytes on the wire against theory, and the order in which collectives are started and awaited.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/fsdp.h"
#include "support/multi_rank.h"
#include "support/predicted_memory.h"
#include "support/recording_communicator.h"
#include "support/reference.h"
#include "support/stack.h"

namespace wire_test {

using fsdp::Placements;
using fsdp::testing::all_strategies;
using fsdp::testing::line;
using fsdp::testing::Log;
using fsdp::testing::make_stack;
using fsdp::testing::run_ranks;
using fsdp::testing::stack_loss;
using fsdp::testing::stack_units;
using fsdp::testing::unit_table;
using fsdp::testing::UnitBytes;
using fsdp::testing::UnitTable;

const std::vector<std::string> kUnits = {"", "blocks.0", "blocks.1", "blocks.2", "blocks.3"};

/// What one step, or one pass of it, should send: the units of each collective by index into kUnits.
struct Expected {
  std::vector<std::size_t> gathered = {};            ///< Parameters.
  std::vector<std::size_t> reduced = {};             ///< Gradients.
  std::vector<std::size_t> gathered_gradients = {};  ///< Reduced ones (no_shard).
  int usage_exchanges = 1;
};

/// Whether any rank had a gradient, and when: four bits for a unit, one for a parameter.
std::int64_t usage_bytes(const torch::nn::Module& model) {
  return (static_cast<std::int64_t>(4 * kUnits.size() + model.named_parameters().size()) + 7) / 8;
}

void expect_wire(const fsdp::FSDPModule& sharded, const UnitTable& units, std::int64_t ranks, std::int64_t usage, const Expected& expected,
                 const std::string& what) {
  const auto stats = sharded.wire_stats();
  // A rank sends (n - 1)/n of the buffer.
  const auto sent = [&](const std::vector<std::size_t>& which, std::int64_t UnitBytes::*buffer) {
    std::int64_t bytes = 0;
    for (const auto index : which) bytes += units[index].second.*buffer / ranks * (ranks - 1);
    return bytes;
  };
  const auto gathers = static_cast<std::int64_t>(expected.gathered.size() + expected.gathered_gradients.size());
  EXPECT_EQ(stats.all_gathers, ranks > 1 ? gathers : 0) << what;
  EXPECT_EQ(stats.all_gather_bytes,
            sent(expected.gathered, &UnitBytes::full) + sent(expected.gathered_gradients, &UnitBytes::trainable_full))
      << what;
  EXPECT_EQ(stats.reduce_scatters, static_cast<std::int64_t>(expected.reduced.size())) << what;
  EXPECT_EQ(stats.reduce_scatter_bytes, sent(expected.reduced, &UnitBytes::trainable_full)) << what;
  EXPECT_EQ(stats.control_bytes, expected.usage_exchanges * (ranks - 1) * usage) << what;
}

struct Step {
  std::vector<std::size_t> order = {};
  bool sync = true;
};

/// One sharded stack and its optimizer, with wire statistics per step.
class Training {
 public:
  Training(const fsdp::DeviceMesh& mesh, fsdp::FullyShardOptions options, const std::function<void(fsdp::testing::Stack&)>& change = {})
      : mesh_(mesh), model_(make_stack()), sharded_(shard(std::move(options), change)), optimizer_(*model_) {}

  /// Forward and backward only, measured by themselves.
  void accumulate(const Step& step = {}) {
    sharded_.reset_wire_stats();
    sharded_.set_requires_gradient_sync(step.sync);
    stack_loss(model_, steps_++, mesh_.rank(), step.order).backward();
  }
  void update() {
    optimizer_.step();
    optimizer_.zero_grad();
  }
  void train(const Step& step = {}) {
    accumulate(step);
    update();
  }
  void expect(const Expected& expected, const std::string& what) const {
    expect_wire(sharded_, units_, mesh_.size(), usage_bytes(*model_), expected, what);
  }
  fsdp::testing::Stack& model() { return model_; }
  fsdp::FSDPModule& sharded() { return sharded_; }

 private:
  fsdp::FSDPModule shard(fsdp::FullyShardOptions options, const std::function<void(fsdp::testing::Stack&)>& change) {
    if (change) change(model_);
    units_ = unit_table(*model_, kUnits, mesh_.size());
    options.mesh = mesh_;
    options.units = stack_units();
    return fsdp::fully_shard(*model_, std::move(options));
  }

  fsdp::DeviceMesh mesh_;
  fsdp::testing::Stack model_;
  UnitTable units_;
  fsdp::FSDPModule sharded_;
  fsdp::AdamW optimizer_;
  std::int64_t steps_ = 0;
};

const std::vector<std::size_t> kAll = {0, 1, 2, 3, 4};
const std::vector<std::size_t> kForwardAndBackward = {0, 1, 2, 3, 4, 3, 2, 1};  // the root stays, and so does the block computed last

class Wire : public ::testing::TestWithParam<int> {};

TEST_P(Wire, AStepSendsWhatItsStrategyNeeds) {
  run_ranks(GetParam(), [] {
    const auto mesh = line();
    for (const auto& strategy : all_strategies()) {
      for (const bool reshard : {true, false}) {
        for (const int depth : {0, 1, 2, 9}) {
          if (depth > 1 && strategy != "optim_grads_params") continue;
          Training training(mesh,
                            {.placements = Placements::from_name(strategy), .reshard_after_forward = reshard, .prefetch_depth = depth});
          Expected expected{.gathered = kAll, .reduced = kAll};
          if (strategy == "no_shard") expected = {.gathered = {}, .reduced = kAll, .gathered_gradients = kAll};
          if (strategy == "optim_grads_params" && reshard) expected.gathered = kForwardAndBackward;
          const std::string what = strategy + (reshard ? ", reshard" : ", no reshard") + ", prefetch_depth " + std::to_string(depth);
          for (int step = 0; step < 3; ++step) {
            training.train();
            // Replicas are up to date until the first update.
            if (step == 0 && (strategy == "optim" || strategy == "optim_grads")) continue;
            training.expect(expected, what + ", step " + std::to_string(step));
          }
        }
      }
    }
  });
}

TEST_P(Wire, ReplicasAreGatheredAfterAnUpdateOnly) {
  run_ranks(GetParam(), [] {
    const auto mesh = line();
    for (const auto* strategy : {"optim", "optim_grads"}) {
      Training training(mesh, {.placements = Placements::from_name(strategy)});
      training.accumulate();
      training.expect({.gathered = {}, .reduced = kAll}, "before the first update");
      training.update();
      training.accumulate();
      training.expect({.gathered = kAll, .reduced = kAll}, "after an update");
      training.accumulate();
      training.expect({.gathered = {}, .reduced = kAll}, "again without an update");
    }
  });
}

TEST_P(Wire, AccumulationWithoutSyncSendsNoGradients) {
  run_ranks(GetParam(), [] {
    const auto mesh = line();
    for (const auto& strategy : all_strategies()) {
      Training training(mesh, {.placements = Placements::from_name(strategy)});
      const bool sharded = strategy == "optim_grads_params";
      for (int step = 0; step < 3; ++step) {
        for (int part = 0; part < 2; ++part) {
          training.accumulate({.sync = false});
          const bool stale = part == 0 && step > 0 && strategy != "no_shard";
          training.expect({.gathered = sharded ? kForwardAndBackward : (stale ? kAll : std::vector<std::size_t>()),
                           .reduced = {},
                           .usage_exchanges = 0},
                          strategy + " without sync");
        }
        training.accumulate();
        training.expect({.gathered = sharded ? kForwardAndBackward : std::vector<std::size_t>(),
                         .reduced = kAll,
                         .gathered_gradients = strategy == "no_shard" ? kAll : std::vector<std::size_t>()},
                        strategy + " with sync");
        training.update();
      }
    }
  });
}

TEST_P(Wire, MemoryThatPeersReadInsteadIsShown) {
  run_ranks(GetParam(), [] {
    unsetenv("FSDP_SHARED_MEMORY");  // which turns it off for all other tests
    for (const bool wanted : {true, false}) {
      const auto mesh = fsdp::init_device_mesh("cpu", {{"dp_shard", -1}}, {.shared_memory = wanted});
      torch::nn::Linear model(256, 256);  // Smaller blocks are copied for the peers.
      auto sharded = fsdp::fully_shard(*model, {.mesh = mesh});
      model->forward(torch::ones({1, 256})).sum().backward();
      const auto memory = sharded.memory_stats();
      EXPECT_GE(memory.slots.live, mesh.size() > 1 ? 256 * 256 * 4 : 0);
      EXPECT_EQ(memory.shared_slots.live, wanted && mesh.size() > 1 ? memory.slots.live : 0);
      EXPECT_EQ(sharded.wire_stats().shared_memory_bytes > 0, wanted && mesh.size() > 1);
    }
  });
}

TEST_P(Wire, UnusedUnitsSendNothing) {
  run_ranks(GetParam(), [] {
    const auto mesh = line();
    for (const int depth : {0, 1, 2}) {
      Training training(mesh, {.prefetch_depth = depth});
      for (int step = 0; step < 3; ++step) training.train({.order = {0, 1, 3}});
      training.expect({.gathered = {0, 1, 2, 4, 2, 1}, .reduced = {0, 1, 2, 4}}, "without blocks.2, depth " + std::to_string(depth));
      // Learned anew in one step.
      training.train();
      training.train();
      training.expect({.gathered = kForwardAndBackward, .reduced = kAll}, "with it again");
    }
  });
}

TEST_P(Wire, FrozenParametersSendNoGradients) {
  run_ranks(GetParam(), [] {
    const auto mesh = line();
    Training training(mesh, {}, [](fsdp::testing::Stack& model) {
      for (auto& item : model->named_parameters()) {
        if (item.key().starts_with("blocks.1.") || item.key() == "blocks.2.down.weight") item.value().requires_grad_(false);
      }
    });
    for (int step = 0; step < 3; ++step) training.train();
    // Bytes count the trainable part of blocks.2; its frozen one is gathered all the same.
    training.expect({.gathered = kForwardAndBackward, .reduced = {0, 1, 3, 4}}, "frozen");
  });
}

TEST_P(Wire, ValidationGathersEachUnitOnce) {
  run_ranks(GetParam(), [] {
    const auto mesh = line();
    for (const int depth : {0, 1}) {
      Training training(mesh, {.prefetch_depth = depth});
      for (int step = 0; step < 3; ++step) training.train();
      const torch::NoGradGuard no_grad;
      training.sharded().reset_wire_stats();
      stack_loss(training.model(), 7, mesh.rank());
      training.expect({.gathered = kAll, .reduced = {}, .usage_exchanges = 0}, "validation");
    }
  });
}

TEST_P(Wire, AGradientNormIsOneSmallExchange) {
  run_ranks(GetParam(), [] {
    const auto mesh = line();
    for (const auto* strategy : {"optim", "optim_grads", "optim_grads_params"}) {
      Training training(mesh, {.placements = Placements::from_name(strategy)});
      training.accumulate();
      training.sharded().reset_wire_stats();
      fsdp::clip_grad_norm(*training.model(), 1.0);
      const auto stats = training.sharded().wire_stats();
      EXPECT_EQ(stats.all_gathers + stats.reduce_scatters, 0);
      EXPECT_LE(stats.control_bytes, (mesh.size() - 1) * 64);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Wire, ::testing::Values(1, 2, 4), [](const auto& info) { return std::to_string(info.param); });

/// What happens in the last of a few steps, seen from one of four ranks whose peers do not exist.
Log log_of_a_step(const fsdp::FullyShardOptions& given, const fsdp::testing::StackOptions& model_options = {.hidden = {4, 5, 6}}) {
  const auto log = std::make_shared<Log>();
  fsdp::FullyShardOptions options = given;
  options.mesh = fsdp::testing::recorded(fsdp::null_device_mesh({{"dp_shard", 4}}), log);
  options.units = stack_units();
  auto model = make_stack(model_options);
  fsdp::fully_shard(*model, options);
  fsdp::SGD optimizer(*model, {.lr = 0.1});
  model->observer = [log](const std::string& event) { log->push_back(event); };
  for (int step = 0; step < 3; ++step) {
    log->clear();
    const auto loss = stack_loss(model, step, 0);
    log->push_back("loss");
    loss.backward();
    log->push_back("step");
    optimizer.step();
    optimizer.zero_grad();
  }
  return *log;
}

std::string joined(const Log& log) {
  std::string text;
  for (const auto& event : log) text += event + "\n";
  return text;
}

TEST(Order, WithoutReadAhead) {
  EXPECT_EQ(joined(log_of_a_step({.prefetch_depth = 0})), joined({
                                                              "gather (root)",
                                                              "wait gather (root)",
                                                              "forward blocks.0",
                                                              "gather blocks.0",
                                                              "wait gather blocks.0",
                                                              "forward blocks.1",
                                                              "gather blocks.1",
                                                              "wait gather blocks.1",
                                                              "forward blocks.2",
                                                              "gather blocks.2",
                                                              "wait gather blocks.2",
                                                              "loss",
                                                              "backward blocks.2",
                                                              "backward blocks.1",
                                                              "reduce blocks.2",
                                                              "gather blocks.1",
                                                              "wait gather blocks.1",
                                                              "backward blocks.0",
                                                              "reduce blocks.1",
                                                              "gather blocks.0",
                                                              "wait gather blocks.0",
                                                              "wait reduce blocks.2",
                                                              "reduce (root)",
                                                              "wait reduce blocks.1",
                                                              "reduce blocks.0",
                                                              "exchange",
                                                              "wait reduce (root)",
                                                              "wait reduce blocks.0",
                                                              "step",
                                                          }));
}

// The next unit's gather is under way before the current one is waited for, let alone computed with. A unit's reduction starts when
// backward moves on from it, and is waited for when a third unit's gradients need room.
TEST(Order, ReadAheadOfOne) {
  EXPECT_EQ(joined(log_of_a_step({.prefetch_depth = 1})), joined({
                                                              "gather (root)",
                                                              "gather blocks.0",
                                                              "wait gather (root)",
                                                              "forward blocks.0",
                                                              "gather blocks.1",
                                                              "wait gather blocks.0",
                                                              "forward blocks.1",
                                                              "gather blocks.2",
                                                              "wait gather blocks.1",
                                                              "forward blocks.2",
                                                              "wait gather blocks.2",
                                                              "loss",
                                                              "gather blocks.1",
                                                              "backward blocks.2",
                                                              "backward blocks.1",
                                                              "reduce blocks.2",
                                                              "gather blocks.0",
                                                              "wait gather blocks.1",
                                                              "backward blocks.0",
                                                              "reduce blocks.1",
                                                              "wait gather blocks.0",
                                                              "wait reduce blocks.2",
                                                              "reduce (root)",
                                                              "wait reduce blocks.1",
                                                              "reduce blocks.0",
                                                              "exchange",
                                                              "wait reduce (root)",
                                                              "wait reduce blocks.0",
                                                              "step",
                                                          }));
}

std::ptrdiff_t position(const Log& log, const std::string& event, std::ptrdiff_t from = 0) {
  const auto found = std::find(log.begin() + from, log.end(), event);
  EXPECT_NE(found, log.end()) << event << " in:\n" << joined(log);
  return found - log.begin();
}

TEST(Order, ReadAheadOfTwo) {
  const auto log = log_of_a_step({.prefetch_depth = 2}, {.hidden = {4, 5, 6, 7, 8}});
  const auto loss = position(log, "loss");
  for (int k = 0; k + 2 < 5; ++k) {
    const auto current = "wait gather blocks." + std::to_string(k);
    EXPECT_LT(position(log, "gather blocks." + std::to_string(k + 2)), position(log, current));
    const auto ahead = position(log, "gather blocks." + std::to_string(k), loss);
    if (k < 2) {
      EXPECT_LT(ahead, position(log, "wait gather blocks." + std::to_string(k + 2), loss));
    }
  }
  // The first two of backward are under way before its first block.
  EXPECT_LT(position(log, "gather blocks.3", loss), position(log, "backward blocks.4"));
  EXPECT_LT(position(log, "gather blocks.2", loss), position(log, "backward blocks.4"));
  EXPECT_GT(position(log, "gather blocks.1", loss), position(log, "backward blocks.4"));
}

TEST(Order, KeptUnitsAreNotGatheredInBackward) {
  for (const int depth : {0, 1, 2}) {
    const auto log = log_of_a_step({.reshard_after_forward = false, .prefetch_depth = depth});
    const auto loss = position(log, "loss");
    EXPECT_EQ(std::count_if(log.begin() + loss, log.end(), [](const auto& event) { return event.starts_with("gather"); }), 0)
        << joined(log);
  }
}

TEST(Order, NestedUnitsKeepTheUnitsAroundThem) {
  const auto log = log_of_a_step({.prefetch_depth = 0}, {.hidden = {4, 5}, .nested = true});
  EXPECT_EQ(joined(log), joined({
                             "gather (root)",
                             "wait gather (root)",
                             "gather blocks.0",
                             "wait gather blocks.0",
                             "forward blocks.0.first",
                             "gather blocks.0.first",
                             "wait gather blocks.0.first",
                             "forward blocks.0.second",
                             "gather blocks.0.second",
                             "wait gather blocks.0.second",
                             "gather blocks.1",
                             "wait gather blocks.1",
                             "forward blocks.1.first",
                             "gather blocks.1.first",
                             "wait gather blocks.1.first",
                             "forward blocks.1.second",
                             "gather blocks.1.second",
                             "wait gather blocks.1.second",
                             "loss",
                             "backward blocks.1.second",
                             "backward blocks.1.first",
                             "reduce blocks.1.second",
                             "gather blocks.1.first",
                             "wait gather blocks.1.first",
                             "reduce blocks.1.first",
                             "wait reduce blocks.1.second",
                             "reduce blocks.1",
                             "gather blocks.0",
                             "wait gather blocks.0",
                             "backward blocks.0.second",
                             "gather blocks.0.second",
                             "wait gather blocks.0.second",
                             "wait reduce blocks.1.first",
                             "backward blocks.0.first",
                             "reduce blocks.0.second",
                             "gather blocks.0.first",
                             "wait gather blocks.0.first",
                             "wait reduce blocks.1",
                             "reduce (root)",
                             "wait reduce blocks.0.second",
                             "reduce blocks.0",
                             "wait reduce (root)",
                             "reduce blocks.0.first",
                             "exchange",
                             "wait reduce blocks.0",
                             "wait reduce blocks.0.first",
                             "step",
                         }));
}

TEST(Order, ReplicatedGradientsAreGatheredOnceReduced) {
  const auto log = log_of_a_step({.placements = Placements::no_shard()});
  for (const auto* unit : {"(root)", "blocks.0", "blocks.1", "blocks.2"}) {
    EXPECT_LT(position(log, std::string("wait reduce ") + unit), position(log, std::string("gather gradients ") + unit));
  }
  EXPECT_LT(position(log, "reduce blocks.2"), position(log, "backward blocks.0"));
}

TEST(Order, IsTheSameWhateverTheTiming) {
  for (const auto& strategy : all_strategies()) {
    const fsdp::FullyShardOptions options{.placements = Placements::from_name(strategy)};
    EXPECT_EQ(joined(log_of_a_step(options)), joined(log_of_a_step(options))) << strategy;
  }
}

/// Units that are used in two places, each with another parameter: once both have a gradient, the first reduction is long under way.
TEST(Order, UnitsThatAreUsedTwiceAreReducedTwiceOnce) {
  for (const auto& strategy : all_strategies()) {
    SCOPED_TRACE(strategy);
    const auto log = std::make_shared<Log>();
    const auto mesh = fsdp::testing::recorded(fsdp::null_device_mesh({{"dp_shard", 4}}), log);
    torch::nn::Sequential model;
    for (int k = 0; k < 4; ++k) model->push_back(torch::nn::Linear(4, 4));
    fsdp::fully_shard(*model, {.mesh = mesh, .units = fsdp::each<torch::nn::LinearImpl>(), .placements = Placements::from_name(strategy)});
    for (int step = 0; step < 3; ++step) {
      log->clear();
      auto x = torch::ones({2, 4}).requires_grad_();
      for (std::size_t k = 0; k < 4; ++k) x = torch::linear(x, model->ptr<torch::nn::LinearImpl>(k)->weight);
      for (std::size_t k = 0; k < 4; ++k) x = x * model->ptr<torch::nn::LinearImpl>(k)->bias;
      x.sum().backward();
      SCOPED_TRACE(joined(*log));
      for (const auto* unit : {"0", "1", "2", "3"}) {
        // It happens, and is then avoided: from the second step on, a unit is reduced when backward departs from it for the second time.
        const auto reduced = std::count(log->begin(), log->end(), std::string("reduce ") + unit);
        EXPECT_EQ(reduced, step == 0 ? 2 : 1) << unit;
        if (strategy != "no_shard") continue;
        EXPECT_EQ(std::count(log->begin(), log->end(), std::string("gather gradients ") + unit), reduced);
        const auto gather = std::find(log->rbegin(), log->rend(), std::string("gather gradients ") + unit);
        const auto reduce = std::find(log->rbegin(), log->rend(), std::string("wait reduce ") + unit);
        EXPECT_LT(gather, reduce);  // counted from the end
      }
      // Units 3, 2 and 1 are reduced on their second departure, before the end of backward.
      if (step > 0) {
        EXPECT_LT(position(*log, "reduce 1"), position(*log, "exchange"));
      }
    }
  }
}

}  // namespace wire_test
