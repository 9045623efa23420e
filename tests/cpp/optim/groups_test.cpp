// Groups of parameters with settings of their own: by name, by index, and changed while a run goes on.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "fsdp/fsdp.h"
#include "support/rules.h"
#include "support/stack.h"
#include "support/twins.h"

namespace fsdp {
namespace groups_test {

using testing::expect_rule;
using testing::fused_adamw;
using testing::has;
using testing::line;
using testing::make_net;
using testing::make_stack;
using testing::message_of;
using testing::over_ranks;
using testing::stack_loss;
using testing::stack_units;

std::vector<std::string> trained_names(const torch::nn::Module& module) {
  std::vector<std::string> names;
  for (const auto& item : module.named_parameters()) {
    if (item.value().requires_grad()) names.push_back(item.key());
  }
  return names;
}

// The root's parameters lie before and behind those of the blocks, and are one unit, which comes first.
TEST(Wrap, GivesShardsInTheModelsOrder) {
  over_ranks([] {
    for (const bool nested : {false, true}) {
      auto model = make_stack({.nested = nested});
      model->entry->bias.requires_grad_(false);
      const auto names = trained_names(*model);
      auto sharded = fully_shard(*model, {.mesh = line(), .units = stack_units()});
      std::vector<at::Tensor> by_index;
      (void)wrap(*model, [&](auto shards) {
        by_index = shards;
        return std::make_unique<torch::optim::SGD>(shards, 0.1);
      });
      std::vector<at::Tensor> by_name;
      std::vector<std::string> given;
      (void)wrap(*model, [&](auto shards, auto its_names) {
        by_name = shards;
        given = its_names;
        return std::make_unique<torch::optim::SGD>(shards, 0.1);
      });
      EXPECT_EQ(given, names);
      ASSERT_EQ(by_index.size(), names.size());
      ASSERT_EQ(by_name.size(), names.size());
      std::size_t i = 0;
      for (const auto& shard : sharded.parameter_shards()) {
        if (shard.name == "entry.bias") continue;
        ASSERT_LT(i, names.size());
        EXPECT_EQ(shard.name, names[i]);
        for (const auto* shards : {&by_index, &by_name}) {
          EXPECT_EQ((*shards)[i].sizes(), shard.value.sizes()) << shard.name;
          if (shard.value.numel() > 0) {
            EXPECT_EQ((*shards)[i].data_ptr(), shard.value.data_ptr()) << shard.name;
          }
        }
        ++i;
      }
      EXPECT_EQ(i, names.size());
    }
  });
}

std::unique_ptr<torch::optim::SGD> sgd_of_two_groups(const std::vector<at::Tensor>& parameters,
                                                     const std::function<bool(std::size_t index)>& is_slow) {
  std::vector<at::Tensor> slow, fast;
  for (std::size_t i = 0; i < parameters.size(); ++i) (is_slow(i) ? slow : fast).push_back(parameters[i]);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(slow, std::make_unique<torch::optim::SGDOptions>(torch::optim::SGDOptions(0.02).weight_decay(0.5)));
  groups.emplace_back(fast, std::make_unique<torch::optim::SGDOptions>(torch::optim::SGDOptions(0.2).momentum(0.5)));
  return std::make_unique<torch::optim::SGD>(groups, torch::optim::SGDOptions(0.1));
}

TEST(Wrap, GroupsByIndexTrainLikeTheUnshardedModel) {
  testing::run_ranks(2, [](int rank) {
    auto whole = make_stack();
    const auto names = trained_names(*whole);
    const auto is_slow = [&](std::size_t i) { return names[i].find("weight") != std::string::npos && !names[i].starts_with("entry."); };
    const auto plain = sgd_of_two_groups(whole->parameters(), is_slow);
    auto model = make_stack();
    auto sharded = fully_shard(*model, {.mesh = line(), .units = stack_units()});
    auto optimizer = wrap(*model, [&](std::vector<at::Tensor> shards) { return sgd_of_two_groups(shards, is_slow); });
    for (int step = 0; step < 4; ++step) {
      for (int r = 0; r < 2; ++r) (stack_loss(whole, step, r) / 2).backward();
      if (step == 2) {
        optimizer.set_lr(1, 0.1);
        optimizer.set_lr_factor(0, 0.5);
        plain->param_groups()[1].options().set_lr(0.1);
        plain->param_groups()[0].options().set_lr(0.02 * 0.5);
      }
      EXPECT_EQ(optimizer.lr(), plain->param_groups()[0].options().get_lr());
      EXPECT_EQ(optimizer.lr(1), plain->param_groups()[1].options().get_lr());
      plain->step();
      plain->zero_grad();
      stack_loss(model, step, rank).backward();
      optimizer.step();
      optimizer.zero_grad();
      const auto expected = whole->named_parameters();
      for (const auto& [name, value] : sharded.full_parameters()) {
        EXPECT_TRUE(torch::allclose(value, expected[name], 1e-4, 1e-6)) << name << ", step " << step;
      }
    }
    EXPECT_TRUE(has(message_of([&] { optimizer.set_lr(2, 0.1); }), "there is no group 2 of parameters; the optimizer was given 2"));
  });
}

std::function<bool(const std::string& name)> begins(const std::string& text) {
  return [text](const std::string& name) { return name.starts_with(text); };
}

TEST(ParamGroups, HaveBetasAndEpsOfTheirOwn) {
  const std::vector<ParamGroup> groups = {{.matches = begins("first."), .betas = std::tuple(0.5, 0.8)},
                                          {.matches = begins("third."), .lr = 0.3, .eps = 1e-2}};
  const auto options_of = [](const std::string& name) {
    AdamWOptions options{.lr = 0.02, .betas = {0.8, 0.9}, .eps = 1e-6, .weight_decay = 0.1};
    if (name.starts_with("first.")) options.betas = {0.5, 0.8};
    if (name.starts_with("third.")) {
      options.lr = 0.3;
      options.eps = 1e-2;
    }
    return options;
  };
  over_ranks([&] {
    expect_rule([&](torch::nn::Module& module) { return AdamW(module, options_of("second."), groups); },
                [&] { return fused_adamw(options_of); });
    // Nothing is large enough for 8 bits: the part in full precision.
    expect_rule(
        [&](torch::nn::Module& module) {
          return AdamW8bit(module, {.lr = 0.02, .betas = {0.8, 0.9}, .eps = 1e-6, .weight_decay = 0.1}, groups);
        },
        [&] { return fused_adamw(options_of); });
    expect_rule(
        [&](torch::nn::Module& module) {
          return Muon(module, {.matrices = [](const std::string&) { return false; }, .adamw = options_of("second.")}, groups);
        },
        [&] { return fused_adamw(options_of); });
  });
}

TEST(AdamW8bit, GroupsHaveBetasAndEpsOfTheirOwn) {
  const auto trained = [](std::vector<ParamGroup> groups, const AdamW8bitOptions& options) {
    const auto model = make_net();
    auto sharded = fully_shard(*model, {.mesh = line(), .granularity = [](const auto&, const auto&) { return Granularity::blocks(256); }});
    AdamW8bit optimizer(*model, options, std::move(groups));
    for (int step = 0; step < 3; ++step) {
      testing::mean_square(*model, step, 0).backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    return sharded.full_parameters();
  };
  testing::run_ranks(2, [&] {
    const AdamW8bitOptions options{.lr = 0.02, .betas = {0.5, 0.8}, .eps = 1e-3, .min_8bit_size = 1};
    auto others = options;
    others.betas = {0.9, 0.999};
    others.eps = 1e-8;
    testing::expect_same_bits(trained({{.matches = begins(""), .betas = options.betas, .eps = options.eps}}, others), trained({}, options));
  });
}

TEST(LearningRate, OfOneGroupChangesLater) {
  const std::vector<ParamGroup> groups = {{.matches = begins("first."), .lr = 0.5}, {.matches = begins("third.")}};
  over_ranks([&] {
    for (const bool muon : {false, true}) {
      auto now = std::make_shared<std::vector<double>>();
      expect_rule(
          [&](torch::nn::Module& module) -> Optimizer {
            *now = {0.02, 0.5, 0.02};
            if (muon) return Muon(module, {.lr = 7, .matrices = [](const auto&) { return false; }, .adamw = {.lr = 0.02}}, groups);
            return AdamW(module, {.lr = 0.02}, groups);
          },
          [&] {
            return fused_adamw([now](const std::string& name) {
              return AdamWOptions{.lr = name.starts_with("first.") ? (*now)[1] : name.starts_with("third.") ? (*now)[2] : (*now)[0]};
            });
          },
          {.before_step = [&, now](Optimizer& optimizer, int step) {
            if (step == 1) {  // one group's schedule
              optimizer.set_lr_factor(0, 0.25);
              *now = {0.02, 0.5 * 0.25, 0.02};
            } else if (step == 2) {  // base rates change below the factors
              optimizer.set_lr(1, 0.3);
              optimizer.set_lr(0, 0.4);
              *now = {0.02, 0.4 * 0.25, 0.3};
            } else if (step == 3) {  // all have one factor again
              optimizer.set_lr_factor(0.5);
              *now = {0.02 * 0.5, 0.4 * 0.5, 0.3 * 0.5};
            } else if (step == 4 && !muon) {
              optimizer.set_lr(0.1);
              *now = {0.1 * 0.5, 0.4 * 0.5, 0.3 * 0.5};
            }
            EXPECT_EQ(optimizer.lr(), muon ? 7 * (step < 3 ? 1 : 0.5) : (*now)[0]);
            EXPECT_EQ(optimizer.lr(0), (*now)[1]);
            EXPECT_EQ(optimizer.lr(1), (*now)[2]);
          }});
    }
  });
}

// Of two algorithms that share the groups, the one that updates a group's parameters says its rate.
TEST(LearningRate, IsThatOfTheGroupsParameters) {
  testing::run_ranks(1, [] {
    const auto model = make_net();
    (void)fully_shard(*model, {.mesh = line()});
    Muon optimizer(*model, {.lr = 0.02, .matrices = [](const std::string& name) { return name == "first.weight"; }, .adamw = {.lr = 0.003}},
                   {{.matches = begins("first.weight")}, {.matches = begins("second.")}});
    EXPECT_EQ(optimizer.lr(), 0.02);
    EXPECT_EQ(optimizer.lr(0), 0.02);
    EXPECT_EQ(optimizer.lr(1), 0.003);
  });
}

TEST(ParamGroups, WhatAnAlgorithmDoesNotHaveIsAnError) {
  testing::run_ranks(1, [] {
    const auto model = make_net();
    (void)fully_shard(*model, {.mesh = line()});
    const auto expect = [&](const std::string& message, const std::string& text) { EXPECT_TRUE(has(message, text)) << message; };
    const ParamGroup betas{.matches = begins("second."), .betas = std::tuple(0.5, 0.5)};
    expect(message_of([&] { SGD(*model, {}, {betas}); }), "a ParamGroup sets betas, but its parameter 'second.weight' is updated by");
    expect(message_of([&] { SGD(*model, {}, {{.matches = begins("third."), .eps = 1e-3}}); }),
           "sets eps, but its parameter 'third.weight'");
    const auto is_weight = [](const std::string& name) { return name.ends_with("weight"); };
    expect(message_of([&] { Muon(*model, {.matrices = is_weight}, {betas}); }), "sets betas, but its parameter 'second.weight'");
    Muon(*model, {.matrices = is_weight}, {{.matches = begins("second.bias"), .betas = std::tuple(0.5, 0.5)}});
    Muon(*model, {.matrices = is_weight}, {{.matches = begins("second."), .eps = 1e-3}});
    expect(message_of([&] { SGD(*model, {}, {{.matches = begins("nothing"), .betas = std::tuple(0.5, 0.5)}}); }),
           "ParamGroup 0 matches no parameter of the model");
    expect(message_of([&] { AdamW(*model, {}, {{.matches = begins(""), .betas = std::tuple(0.5, 1.0)}}); }), "betas must lie in [0, 1)");
    expect(message_of([&] { AdamW(*model, {}, {{.matches = begins(""), .eps = -1.0}}); }), "eps must be at least 0");
  });
}

TEST(LearningRate, OfNoGroupOrBelowZeroIsAnError) {
  testing::run_ranks(1, [] {
    const auto model = make_net();
    (void)fully_shard(*model, {.mesh = line()});
    SGD optimizer(*model, {.lr = 0.1}, {{.matches = begins("third.")}});
    const auto expect = [&](const std::string& message, const std::string& text) { EXPECT_TRUE(has(message, text)) << message; };
    const std::string none = "there is no group 1 of parameters; the optimizer was given 1, which are numbered from 0";
    expect(message_of([&] { optimizer.set_lr(1, 0.1); }), none);
    expect(message_of([&] { optimizer.set_lr_factor(1, 0.1); }), none);
    expect(message_of([&] { (void)optimizer.lr(1); }), none);
    expect(message_of([&] { optimizer.set_lr(-0.1); }), "learning rate -0.1");
    expect(message_of([&] { optimizer.set_lr(0, -0.1); }), "learning rate -0.1");
    EXPECT_EQ(optimizer.lr(), 0.1);
    EXPECT_EQ(optimizer.lr(0), 0.1);
  });
}

}  // namespace groups_test
}  // namespace fsdp
