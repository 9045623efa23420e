// Gradients that only some ranks have, or none, and units that backward enters more than once: what is reduced when, and to what.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/fsdp.h"
#include "support/meshes.h"
#include "support/multi_rank.h"
#include "support/recording_communicator.h"
#include "support/reference.h"
#include "support/same_bits.h"

namespace usage_test {

using fsdp::FullyShardOptions;
using fsdp::Placements;
using fsdp::testing::all_strategies;
using fsdp::testing::line;
using fsdp::testing::Log;
using fsdp::testing::NamedTensors;
using fsdp::testing::plane;
using fsdp::testing::run_ranks;

struct ShiftImpl : torch::nn::Module {
  explicit ShiftImpl(std::int64_t width) : bias(register_parameter("bias", torch::randn({width}))) {}
  at::Tensor bias;
};
TORCH_MODULE(Shift);

/// Matrices, and beside them units that backward never enters, as nothing needs their values: a bias after each matrix, and a table that is
/// added in the middle. A rank may leave out the gradients of any of these.
struct PartialImpl : torch::nn::Module {
  PartialImpl() : table(register_module("table", torch::nn::Embedding(7, 4))), head(register_module("head", torch::nn::Linear(4, 2))) {
    for (int k = 0; k < 3; ++k) {
      const auto number = std::to_string(k);
      blocks.push_back(register_module("block" + number, torch::nn::Linear(torch::nn::LinearOptions(4, 4).bias(false))));
      shifts.push_back(register_module("shift" + number, Shift(4)));
    }
  }
  at::Tensor forward(const at::Tensor& tokens, const std::vector<bool>& left_out) {
    const auto kept = [&](std::size_t k, const at::Tensor& x) { return left_out.at(k) ? x.detach() : x; };
    auto x = torch::one_hot(tokens, 7).to(at::kFloat).narrow(1, 0, 4);
    for (std::size_t k = 0; k < blocks.size(); ++k) {
      x = torch::tanh(blocks[k](x)) + kept(k + 1, shifts[k]->bias);
      if (k == 1) x = x + kept(0, table(tokens));
    }
    return head(x);
  }
  torch::nn::Embedding table;
  std::vector<torch::nn::Linear> blocks;
  std::vector<Shift> shifts;
  torch::nn::Linear head;
};
TORCH_MODULE(Partial);

fsdp::UnitPredicate partial_units() { return fsdp::each<torch::nn::LinearImpl, torch::nn::EmbeddingImpl, ShiftImpl>(); }

Partial make_model() {
  torch::manual_seed(5);
  return Partial();
}

at::Tensor loss_of(Partial& model, std::int64_t step, std::int64_t rank, const std::vector<bool>& left_out) {
  const auto tokens = (torch::arange(6) * (3 + rank) + step).remainder(7);
  return model->forward(tokens, left_out).square().mean();
}

/// For each rank what it leaves out: the table, then the blocks' biases.
using LeftOut = std::vector<std::vector<bool>>;

class Usage : public ::testing::TestWithParam<int> {};

std::vector<std::pair<std::string, LeftOut>> cases(int ranks) {
  const std::vector<bool> nothing(4, false);
  const auto n = static_cast<std::size_t>(ranks);
  std::vector<std::pair<std::string, LeftOut>> all;
  LeftOut one(n, nothing);
  one.back()[0] = true;
  all.emplace_back("the last rank lacks the table", one);
  one = LeftOut(n, nothing);
  one.front()[2] = true;
  all.emplace_back("rank 0 lacks a bias", one);
  LeftOut another(n, nothing);
  for (std::size_t rank = 0; rank < n; ++rank) another[rank][rank % 4] = true;
  all.emplace_back("each rank lacks another one", another);
  LeftOut only(n, std::vector<bool>(4, true));
  for (std::size_t rank = 0; rank < n; ++rank) only[rank][(rank + 1) % 4] = false;
  all.emplace_back("each rank has another one", only);
  all.emplace_back("no rank has any", LeftOut(n, std::vector<bool>(4, true)));
  return all;
}

/// A frozen matrix, which backward needs, and a factor that some ranks leave out.
struct ScaledImpl : torch::nn::Module {
  ScaledImpl()
      : weight(register_parameter("weight", torch::randn({4, 4}), /*requires_grad=*/false)),
        factor(register_parameter("factor", torch::rand({4}))) {}
  at::Tensor forward(const at::Tensor& x) { return torch::tanh(torch::linear(x, weight)); }
  at::Tensor weight, factor;
};
TORCH_MODULE(Scaled);

// [Reduce on departure] Backward enters the unit on all ranks, and has gradients for it on some.
TEST_P(Usage, RanksWithoutAnyGradientReduceOnDepartureWithTheOthers) {
  run_ranks(GetParam(), [](int rank) {
    const int ranks = GetParam();
    const auto make = [] {
      torch::manual_seed(8);
      return torch::nn::Sequential(torch::nn::Linear(4, 4), Scaled(), Scaled());
    };
    const auto loss = [](torch::nn::Sequential& model, int rank) {
      auto x = model[0]->as<torch::nn::LinearImpl>()->forward(torch::ones({2, 4}) * (rank + 1));
      for (int k = 1; k < 3; ++k) {
        auto& block = *model[static_cast<std::size_t>(k)]->as<ScaledImpl>();
        x = block.forward(x);
        if ((rank + k) % 2 == 0) x = x * block.factor;
      }
      return x.square().sum();
    };
    auto whole = make();
    for (int r = 0; r < ranks; ++r) loss(whole, r).div(ranks).backward();

    auto model = make();
    const auto log = std::make_shared<Log>();
    auto sharded =
        fsdp::fully_shard(*model, {.mesh = fsdp::testing::recorded(line(), log), .units = fsdp::each<torch::nn::LinearImpl, ScaledImpl>()});
    log->clear();
    loss(model, rank).backward();
    for (const auto& [name, gradient] : sharded.full_gradients()) {
      const auto expected = whole->named_parameters()[name].grad();
      ASSERT_EQ(gradient.defined(), expected.defined()) << name;
      if (expected.defined()) {
        EXPECT_TRUE(at::allclose(gradient, expected)) << name;
      }
    }
    const auto end = std::find(log->begin(), log->end(), std::string("exchange"));
    EXPECT_LT(std::find(log->begin(), log->end(), std::string("reduce 2")), end);  // from the last block, backward departs to the first
  });
}

// A gradient that a rank lacks counts as zero, at whatever moment the others reduce theirs.
TEST_P(Usage, AGradientThatARankLacksCountsAsZero) {
  run_ranks(GetParam(), [](int rank) {
    const int ranks = GetParam();
    std::vector<std::pair<std::string, FullyShardOptions>> variants;
    for (const auto& strategy : all_strategies()) {
      variants.emplace_back(strategy, FullyShardOptions{.mesh = line(), .placements = Placements::from_name(strategy)});
    }
    if (ranks == 4) variants.emplace_back("HSDP", FullyShardOptions{.mesh = plane()});
    for (const auto& [what, left_out] : cases(ranks)) {
      // The same model unsharded: each rank's gradients by themselves, added in the order of the ranks.
      auto whole = make_model();
      NamedTensors expected;
      for (const auto& item : whole->named_parameters()) expected.emplace_back(item.key(), at::Tensor());
      for (int r = 0; r < ranks; ++r) {
        auto replica = make_model();
        for (int step = 0; step < 2; ++step) loss_of(replica, step, r, left_out[static_cast<std::size_t>(r)]).div(ranks).backward();
        for (auto& [name, sum] : expected) {
          const auto gradient = replica->named_parameters()[name].grad();
          if (gradient.defined()) sum = sum.defined() ? sum + gradient : gradient;
        }
      }
      for (const auto& [strategy, given] : variants) {
        SCOPED_TRACE(what + ", " + strategy);
        auto model = make_model();
        auto options = given;
        options.units = partial_units();
        auto sharded = fsdp::fully_shard(*model, options);
        for (int pass = 0; pass < 3; ++pass) {
          for (int step = 0; step < 2; ++step) loss_of(model, step, rank, left_out[static_cast<std::size_t>(rank)]).backward();
          const auto gradients = sharded.full_gradients();
          for (std::size_t i = 0; i < gradients.size(); ++i) {
            ASSERT_EQ(gradients[i].second.defined(), expected[i].second.defined()) << gradients[i].first;
            if (!expected[i].second.defined()) continue;
            EXPECT_TRUE(torch::allclose(gradients[i].second, expected[i].second, 1e-5, 1e-7)) << gradients[i].first;
          }
          sharded.zero_grad();
        }
      }
    }
  });
}

// [Usage is agreed] What is left to the end of a backward is expected there by the next one, rightly or not.
TEST_P(Usage, WhatIsLeftToTheEndMayChange) {
  run_ranks(GetParam(), [](int rank) {
    const auto ranks = static_cast<std::size_t>(GetParam());
    for (const bool accumulates : {false, true}) {
      auto whole = make_model();
      auto model = make_model();
      auto sharded = fsdp::fully_shard(*model, {.mesh = line(), .units = partial_units()});
      std::uint64_t bits = 1;
      for (int step = 0; step < 12; ++step) {
        // Mostly all ranks alike, so that some parameters have a gradient on no rank.
        LeftOut left_out(ranks, std::vector<bool>(4));
        for (std::size_t r = 0; r < ranks; ++r) {
          if (r == 0 || step % 3 == 2) bits = bits * 6364136223846793005ULL + 1442695040888963407ULL;
          for (std::size_t k = 0; k < 4; ++k) left_out[r][k] = (bits >> (40 + k) & 1) != 0;
        }
        for (std::size_t r = 0; r < ranks; ++r) {
          loss_of(whole, step, static_cast<int>(r), left_out[r]).div(static_cast<double>(ranks)).backward();
        }
        loss_of(model, step, rank, left_out[static_cast<std::size_t>(rank)]).backward();
        const auto expected = whole->named_parameters();
        for (const auto& [name, gradient] : sharded.full_gradients()) {
          ASSERT_EQ(gradient.defined(), expected[name].grad().defined()) << name << ", step " << step;
          if (!gradient.defined()) continue;
          EXPECT_TRUE(torch::allclose(gradient, expected[name].grad(), 1e-5, 1e-7)) << name << ", step " << step;
        }
        if (accumulates && step % 4 != 3) continue;
        whole->zero_grad();
        sharded.zero_grad();
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Usage, ::testing::Values(1, 2, 4), [](const auto& info) { return std::to_string(info.param); });

struct Recorded {
  std::shared_ptr<Log> log = std::make_shared<Log>();
  fsdp::DeviceMesh mesh = fsdp::testing::recorded(fsdp::null_device_mesh({{"dp_shard", 4}}), log);
  std::int64_t reductions() const {
    return std::count_if(log->begin(), log->end(), [](const auto& event) { return event.starts_with("reduce "); });
  }
};

// The order of collectives is the same on a rank that lacks gradients: only the end of backward knows of them.
// Later hops (the gathers of no_shard) included.
TEST(ReductionOrder, DoesNotDependOnWhichGradientsARankHas) {
  for (const auto& strategy : all_strategies()) {
    std::vector<Log> logs;
    for (const auto& left_out : {std::vector<bool>(4, false), {true, false, true, false}, std::vector<bool>{false, true, true, true}}) {
      const Recorded recorded;
      auto model = make_model();
      fsdp::fully_shard(*model, {.mesh = recorded.mesh, .units = partial_units(), .placements = Placements::from_name(strategy)});
      recorded.log->clear();
      loss_of(model, 0, 0, left_out).backward();
      Log until_the_end(recorded.log->begin(), std::find(recorded.log->begin(), recorded.log->end(), "exchange"));
      // When a rank waits is its own affair.
      std::erase_if(until_the_end, [](const auto& event) { return event.starts_with("wait"); });
      logs.push_back(until_the_end);
    }
    EXPECT_EQ(logs[0], logs[1]) << strategy;
    EXPECT_EQ(logs[0], logs[2]) << strategy;
    EXPECT_GT(std::count_if(logs[0].begin(), logs[0].end(), [](const auto& event) { return event.starts_with("reduce "); }), 0);
  }
}

// [Usage is agreed] A device reduces what was left to the end last time while the ranks ask each other. What no rank has this time is
// reduced in vain, once.
TEST(ReductionOrder, WhatWasLeftToTheEndIsReducedBeforeTheRanksAsk) {
  const Recorded recorded;
  auto model = make_model();
  auto sharded = fsdp::fully_shard(*model, {.mesh = recorded.mesh, .units = partial_units()});
  const auto log_of = [&](bool without_table) {
    sharded.zero_grad();
    recorded.log->clear();
    loss_of(model, 0, 0, {without_table, false, false, false}).backward();
    Log log;
    for (const auto& event : *recorded.log) {
      if (event == "reduce table" || event == "exchange") log.push_back(event);
    }
    return log;
  };
  EXPECT_EQ(log_of(false), (Log{"exchange", "reduce table"}));
  EXPECT_EQ(log_of(false), (Log{"reduce table", "exchange"}));
  EXPECT_EQ(log_of(true), (Log{"reduce table", "exchange"}));
  for (const auto& [name, gradient] : sharded.full_gradients()) EXPECT_EQ(gradient.defined(), name != "table.weight") << name;
  EXPECT_EQ(log_of(true), Log{"exchange"});
  EXPECT_EQ(log_of(false), (Log{"exchange", "reduce table"}));
}

// A unit is on its way when a second gradient of it comes, on some ranks: these wait for it. The next hops of all reductions still begin
// where those of the other ranks do.
TEST(ReductionOrder, DoesNotDependOnGradientsThatComeLate) {
  for (const auto& strategy : all_strategies()) {
    std::vector<Log> logs;
    for (const bool has_late_gradients : {true, false}) {
      const Recorded recorded;
      torch::nn::Sequential model;
      for (int k = 0; k < 4; ++k) model->push_back(torch::nn::Linear(4, 4));
      const auto units = fsdp::each<torch::nn::LinearImpl>();
      fsdp::fully_shard(*model, {.mesh = recorded.mesh, .units = units, .placements = Placements::from_name(strategy)});
      recorded.log->clear();
      auto x = torch::ones({2, 4}).requires_grad_();
      for (std::size_t k = 0; k < 4; ++k) {
        const auto& weight = model->ptr<torch::nn::LinearImpl>(k)->weight;
        x = torch::linear(x, has_late_gradients ? weight : weight.detach());
      }
      for (std::size_t k = 0; k < 4; ++k) x = x * model->ptr<torch::nn::LinearImpl>(k)->bias;
      x.sum().backward();
      Log until_the_end(recorded.log->begin(), std::find(recorded.log->begin(), recorded.log->end(), "exchange"));
      std::erase_if(until_the_end, [](const auto& event) { return event.starts_with("wait"); });
      logs.push_back(until_the_end);
    }
    EXPECT_EQ(logs[0], logs[1]) << strategy;
  }
}

// grad() for chosen tensors uses units whose gradients nobody asks for.
TEST(ReductionOrder, ABackwardForChosenTensorsReducesNothing) {
  const Recorded recorded;
  auto model = make_model();
  auto sharded = fsdp::fully_shard(*model, {.mesh = recorded.mesh, .units = partial_units()});
  const auto x = torch::ones({3, 4}).requires_grad_();
  const auto y = torch::linear(torch::tanh(torch::linear(x, model->blocks[0]->weight)), model->blocks[1]->weight);
  const auto gradients = torch::autograd::grad({y.sum()}, {x});
  EXPECT_TRUE(gradients.front().defined());
  EXPECT_EQ(recorded.reductions(), 0);
  EXPECT_EQ(sharded.memory_stats().main_gradients.live, 0);
}

}  // namespace usage_test
