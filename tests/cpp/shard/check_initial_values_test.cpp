// FullyShardOptions::check_initial_values: ranks that began with other values are told so, all of them.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <memory>
#include <string>

#include "fsdp/fsdp.h"
#include "support/collected_warnings.h"
#include "support/twins.h"

namespace fsdp {
namespace check_initial_values_test {

using testing::all_strategies;
using testing::each_linear;
using testing::expect_same;
using testing::has;
using testing::line;
using testing::make_net;
using testing::message_of;
using testing::Net;
using testing::plane;

FullyShardOptions checked(const DeviceMesh& mesh) { return {.mesh = mesh, .units = each_linear(), .check_initial_values = true}; }

/// The message on this rank, if `change` is made on the ranks with `here`.
std::string message_after(const DeviceMesh& mesh, bool here, const std::function<void(Net&)>& change) {
  const auto model = make_net();
  if (here) {
    const torch::NoGradGuard no_grad;
    change(*model);
  }
  return message_of([&] { fully_shard(*model, checked(mesh)); });
}

TEST(CheckInitialValues, EqualOnesPass) {
  testing::over_ranks([] {
    for (const auto& strategy : all_strategies()) {
      const auto model = make_net();
      auto options = checked(line());
      options.placements = Placements::from_name(strategy);
      const auto sharded = fully_shard(*model, options);
      expect_same(sharded.full_parameters(), testing::values_of(*make_net()), 0, strategy);
    }
    // NaN is what it is, in the same bits.
    EXPECT_EQ(message_after(line(), true, [](Net& net) { net.first->bias[3] = std::nan(""); }), "no error");
  });
}

TEST(CheckInitialValues, NamesUnitParameterAndTwoRanks) {
  testing::run_ranks(4, [](int rank) {
    const auto message = message_after(line(), rank >= 2, [](Net& net) {
      net.third->weight[0][0] += 1;
      net.second->bias[9] = std::nextafter(net.second->bias[9].item<float>(), 10.F);  // the last bit of the last element
    });
    EXPECT_TRUE(has(message, "rank 0 and rank 2 began with different values of parameter 'second.bias' of unit 'second'")) << message;
    EXPECT_TRUE(has(message, "manual_seed")) << message;
  });
  testing::run_ranks(2, [](int rank) {
    const auto differ = [&](const std::function<void(Net&)>& change) { return message_after(line(), rank == 1, change); };
    // Zeros of both signs are equal to an operator; exchanged rows have the same sums.
    const auto zeros = [&](double sign) { return [sign](Net& net) { net.first->bias.fill_(sign * 0.0); }; };
    EXPECT_TRUE(has(message_after(line(), true, zeros(rank == 0 ? 1.0 : -1.0)), "'first.bias'"));
    EXPECT_TRUE(has(differ([](Net& net) { net.first->weight.copy_(net.first->weight.flip(0)); }), "'first.weight'"));
  });
}

/// Over two dimensions, and over fewer ranks than all: experts may differ, and where one's replicas do, all ranks hear of it.
TEST(CheckInitialValues, OverTheMeshOfEachUnit) {
  testing::run_ranks(4, [](int rank) {
    const auto grid = plane();
    for (int other = 1; other < 4; ++other) {
      const auto message = message_after(grid, rank == other, [](Net& net) { net.first->weight[1][1] = 7; });
      EXPECT_TRUE(has(message, "rank 0 and rank " + std::to_string(other) + " began")) << message;
    }
    auto options = checked(grid);
    options.unit_settings = [&](const std::string& name, const torch::nn::Module&) {
      return UnitSettings{.mesh = name == "second" ? grid["dp_shard"] : DeviceMesh{}};
    };
    const auto with_expert = [&](double value) {
      const auto model = make_net();
      const torch::NoGradGuard no_grad;
      model->second->bias.fill_(value);
      return message_of([&] { fully_shard(*model, options); });
    };
    EXPECT_EQ(with_expert(rank / 2), "no error");
    const auto message = with_expert(rank == 3 ? 5 : 0);
    EXPECT_TRUE(has(message, "rank 2 and rank 3 began with different values of parameter 'second.bias'")) << message;
  });
}

TEST(CheckInitialValues, OfDeferredModels) {
  testing::run_ranks(2, [](int rank) {
    const auto message = [&](std::uint64_t seed) {
      torch::manual_seed(seed);
      const auto model = deferred_init([] { return std::make_shared<Net>(); });
      return message_of([&] { fully_shard(*model, checked(line())); });
    };
    EXPECT_EQ(message(3), "no error");
    EXPECT_TRUE(
        has(message(3 + static_cast<std::uint64_t>(rank)), "rank 0 and rank 1 began with different values of parameter 'first.weight'"));
  });
}

TEST(CheckInitialValues, IsForOwnValuesOnly) {
  testing::run_ranks(2, [] {
    for (const auto from : {InitialValues::kFromRank0, InitialValues::kZero}) {
      const auto model = make_net();
      auto options = checked(line());
      options.initial_values = from;
      EXPECT_TRUE(has(message_of([&] { fully_shard(*model, options); }), "check_initial_values compares the ranks' own values"));
    }
  });
}

/// A net whose weight 'second' is `value`, sharded and trained for two backwards, with the warnings of these.
std::string warnings_of(
    FullyShardOptions options, double value, const std::function<void(Net&)>& write = [](Net&) {}) {
  const auto model = make_net();
  {
    const torch::NoGradGuard no_grad;
    model->second->weight.fill_(value);
  }
  options.units = each_linear();
  const auto sharded = fully_shard(*model, options);
  write(*model);
  const testing::CollectedWarnings warnings;
  for (int i = 0; i < 2; ++i) model->forward(at::ones({1, 6})).sum().backward();
  return warnings.text();
}

/// Without it, ranks that were seeded differently are warned once.
TEST(CheckInitialValues, WarnsByDefault) {
  testing::run_ranks(2, [](int rank) {
    for (const auto& strategy : all_strategies()) {
      const auto of = [&](InitialValues from) {
        return FullyShardOptions{.mesh = line(), .placements = Placements::from_name(strategy), .initial_values = from};
      };
      const auto text = warnings_of(of(InitialValues::kOwn), rank);
      EXPECT_TRUE(has(text, "ranks 0 and 1 began with different values of parameter 'second.weight' of unit 'second'")) << strategy;
      EXPECT_EQ(text.find("began with"), text.rfind("began with")) << text;
      EXPECT_EQ(warnings_of(of(InitialValues::kOwn), 1), "") << strategy;
      auto in_double = of(InitialValues::kOwn);
      in_double.mixed_precision = MixedPrecisionPolicy{.main_params_dtype = at::kDouble};
      EXPECT_TRUE(has(warnings_of(in_double, rank), "'second.weight'")) << strategy;
      EXPECT_EQ(warnings_of(of(InitialValues::kFromRank0), rank), "") << strategy;
    }
  });
}

/// Values that the program has written count as its own, whatever the module began with.
TEST(CheckInitialValues, DoesNotWarnOfValuesThatWereWrittenSince) {
  testing::run_ranks(2, [](int rank) {
    for (const auto& strategy : all_strategies()) {
      const FullyShardOptions options{.mesh = line(), .placements = Placements::from_name(strategy)};
      const auto by_operator = [](Net& net) {
        const torch::NoGradGuard no_grad;
        net.second->weight.fill_(3);
      };
      EXPECT_EQ(warnings_of(options, rank, by_operator), "") << strategy;
      const auto in_summon = [&](Net& net) {
        const SummonFullParams guard(net);
        by_operator(net);
      };
      EXPECT_EQ(warnings_of(options, rank, in_summon), "") << strategy;
    }
  });
}

/// Experts on ranks of their own may differ.
TEST(CheckInitialValues, WarnsOfTheMeshOfEachUnit) {
  testing::run_ranks(4, [](int rank) {
    const auto grid = plane();
    FullyShardOptions options{.mesh = grid};
    options.unit_settings = [&](const std::string& name, const torch::nn::Module&) {
      return UnitSettings{.mesh = name == "second" ? grid["dp_shard"] : DeviceMesh{}};
    };
    EXPECT_EQ(warnings_of(options, rank / 2), "");
    EXPECT_EQ(has(warnings_of(options, rank == 3 ? 5 : 0), "ranks 2 and 3 began with different values"), rank >= 2);
  });
}

}  // namespace check_initial_values_test
}  // namespace fsdp
