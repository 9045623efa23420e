// The settings of an optimizer's groups, across a save and a load: a run goes on as if nothing had been, whatever its program set
// meanwhile.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "fsdp/fsdp.h"
#include "support/checkpoint_test.h"
#include "support/edited_checkpoint.h"
#include "support/messages.h"
#include "support/multi_rank.h"
#include "support/python_peer.h"
#include "support/same_bits.h"
#include "test_paths.h"

namespace optimizer_settings_test {

using fsdp::ParamGroup;
using fsdp::testing::expect_same_bits;
using fsdp::testing::has;
using fsdp::testing::make;
using fsdp::testing::MakeOptimizer;
using fsdp::testing::message_of;
using fsdp::testing::run_ranks;
using fsdp::testing::Training;

using OptimizerSettings = fsdp::testing::CheckpointTest;

std::function<bool(const std::string& name)> begins(const std::string& text) {
  return [text](const std::string& name) { return name.starts_with(text); };
}

bool is_block(const std::string& name) { return name.starts_with("blocks."); }

template <typename Optimizer, typename Options>
MakeOptimizer grouped(Options options, std::vector<ParamGroup> groups) {
  return [=](torch::nn::Module& module) { return std::make_unique<Optimizer>(module, options, groups); };
}

std::vector<ParamGroup> groups(double lr, double weight_decay) {
  return {{.matches = begins("blocks.0."), .lr = lr}, {.matches = begins("head."), .weight_decay = weight_decay}};
}

template <typename Options>
MakeOptimizer wrapped_sgd(Options options, double lr_of_rest) {
  return [=](torch::nn::Module& module) {
    return std::make_unique<fsdp::WrappedOptimizer>(
        module, fsdp::NamedTorchOptimizerFactory([=](std::vector<at::Tensor> shards, std::vector<std::string> names) {
          std::vector<at::Tensor> of_blocks, rest;
          for (std::size_t i = 0; i < shards.size(); ++i) (is_block(names[i]) ? of_blocks : rest).push_back(shards[i]);
          std::vector<torch::optim::OptimizerParamGroup> all;
          all.emplace_back(of_blocks, std::make_unique<torch::optim::SGDOptions>(options));
          all.emplace_back(rest, std::make_unique<torch::optim::SGDOptions>(torch::optim::SGDOptions(lr_of_rest).momentum(0.3)));
          return std::make_unique<torch::optim::SGD>(all, options);
        }));
  };
}

/// The optimizer of a run, and one of the same groups with other settings, into which it is loaded.
struct Pair {
  std::string name;
  MakeOptimizer saved;
  MakeOptimizer other;
  fsdp::FullyShardOptions options = {};
};

std::vector<Pair> pairs() {
  const fsdp::AdamWOptions adamw{.lr = 1e-2, .betas = {0.8, 0.95}, .eps = 1e-4, .weight_decay = 0.2};
  const fsdp::SGDOptions sgd{.lr = 0.1, .momentum = 0.9, .dampening = 0, .weight_decay = 0.1, .nesterov = true};
  const fsdp::MuonOptions muon{
      .lr = 0.05, .weight_decay = 0.1, .momentum = 0.8, .nesterov = false, .eps = 1e-3, .matrices = is_block, .adamw = adamw};
  const fsdp::AdamW8bitOptions bits{.lr = 1e-2, .betas = {0.8, 0.95}, .eps = 1e-4, .weight_decay = 0.2, .min_8bit_size = 100};
  auto betas = groups(0.3, 0.4);
  betas[0].betas = std::tuple(0.5, 0.6);
  betas[1].eps = 1e-2;
  return {{"AdamW", grouped<fsdp::AdamW>(adamw, betas), grouped<fsdp::AdamW>(fsdp::AdamWOptions{}, groups(7, 8))},
          {"SGD", grouped<fsdp::SGD>(sgd, groups(0.3, 0.4)),
           grouped<fsdp::SGD>(fsdp::SGDOptions{.lr = 9, .momentum = 0.1, .dampening = 0.5}, groups(7, 8))},
          {"Muon",
           grouped<fsdp::Muon>(muon, groups(0.3, 0.4)),
           grouped<fsdp::Muon>(fsdp::MuonOptions{.matrices = is_block}, groups(7, 8)),
           {.granularity = fsdp::whole_matrices(is_block)}},
          {"AdamW8bit",
           grouped<fsdp::AdamW8bit>(bits, groups(0.3, 0.4)),
           grouped<fsdp::AdamW8bit>(fsdp::AdamW8bitOptions{.min_8bit_size = 100}, groups(7, 8)),
           {.granularity = [](const auto&, const auto&) { return fsdp::Granularity::blocks(256); }}},
          {"wrapped", wrapped_sgd(torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(0.1), 0.2),
           wrapped_sgd(torch::optim::SGDOptions(9).momentum(0.1).dampening(0.5), 8)}};
}

TEST_F(OptimizerSettings, ComeBackAndTrainAsBefore) {
  for (const int ranks : {1, 2}) {
    run_ranks(ranks, [&] {
      for (auto& [name, saved, other, options] : pairs()) {
        for (const double factor : {0.5, 0.0}) {
          SCOPED_TRACE(name + " " + std::to_string(ranks) + " " + std::to_string(factor));
          const auto step = path(name + std::to_string(ranks) + std::to_string(factor));
          Training run(options, saved);
          run.train(0, 1);
          run.optimizer->set_lr(1, 0.07);
          run.optimizer->set_lr_factor(factor);
          run.optimizer->set_lr_factor(0, 0.3);
          run.train(1, 2);
          fsdp::save(step, *run.model, *run.optimizer);
          Training fresh(options, other, 12);
          fresh.optimizer->set_lr_factor(3);
          fsdp::load(step, *fresh.model, *fresh.optimizer, {.optimizer_settings = true});
          const auto same_rates = [&] {
            EXPECT_EQ(fresh.optimizer->lr(), run.optimizer->lr());
            for (const std::size_t group : {0, 1}) EXPECT_EQ(fresh.optimizer->lr(group), run.optimizer->lr(group)) << group;
          };
          same_rates();
          for (auto* training : {&run, &fresh}) {
            training->train(2, 4);
            training->optimizer->set_lr_factor(0.7);  // of base rates, which have come back, too
            training->train(4, 5);
          }
          same_rates();
          expect_same_bits(fresh.handle->full_parameters(), run.handle->full_parameters());
        }
      }
    });
  }
}

TEST_F(OptimizerSettings, StayTheProgramsOwnWithoutTheOption) {
  run_ranks(2, [&] {
    for (auto& [name, saved, other, options] : pairs()) {
      SCOPED_TRACE(name);
      Training run(options, saved);
      run.train(0, 1);
      run.optimizer->set_lr_factor(0.5);
      run.optimizer->set_lr_factor(1, 0.25);
      fsdp::save(path(name), *run.model, *run.optimizer);
      Training fresh(options, other, 12);
      const auto own = fresh.optimizer->lr();
      const std::vector<double> of_groups = {fresh.optimizer->lr(0), fresh.optimizer->lr(1)};
      fsdp::load(path(name), *fresh.model, *fresh.optimizer);
      // A group's factor is a part of the run, as all groups' is.
      EXPECT_EQ(fresh.optimizer->lr(), own * 0.5);
      EXPECT_EQ(fresh.optimizer->lr(0), of_groups[0] * 0.5);
      EXPECT_EQ(fresh.optimizer->lr(1), of_groups[1] * 0.25);
    }
  });
}

TEST_F(OptimizerSettings, WhatCannotBeSetIsAnErrorAndChangesNothing) {
  run_ranks(2, [&] {
    const auto saved = [&](const std::string& name, const MakeOptimizer& make_optimizer) {
      Training run({}, make_optimizer);
      run.train(0, 1);
      fsdp::save(path(name), *run.model, *run.optimizer);
    };
    const auto expect_refused = [&](const std::string& name, const MakeOptimizer& make_optimizer, const std::string& text) {
      SCOPED_TRACE(name);
      Training other({}, make_optimizer, 12);
      other.train(0, 1);
      Training same({}, make_optimizer, 12);
      same.train(0, 1);
      const auto lr = other.optimizer->lr();
      const auto message =
          message_of([&] { fsdp::load(path(name), *other.model, *other.optimizer, {.strict = false, .optimizer_settings = true}); });
      EXPECT_TRUE(has(message, text)) << message;
      EXPECT_EQ(other.optimizer->lr(), lr);
      other.train(1, 3);
      same.train(1, 3);
      expect_same_bits(other.handle->full_parameters(), same.handle->full_parameters());
    };
    saved("groups", grouped<fsdp::AdamW>(fsdp::AdamWOptions{.lr = 0.1}, groups(0.3, 0.4)));
    expect_refused("groups", make<fsdp::AdamW>(fsdp::AdamWOptions{.lr = 0.2}),
                   "are in one group here, but were saved with different settings (lr: 0.");
    saved("decay", grouped<fsdp::AdamW>(fsdp::AdamWOptions{.weight_decay = 0.5}, {{.matches = begins("head."), .weight_decay = 0.25}}));
    expect_refused("decay", make<fsdp::AdamW>(fsdp::AdamWOptions{.lr = 0.2}), "with different settings (weight_decay: 0.5 and 0.25)");
    saved("momentum", make<fsdp::SGD>(fsdp::SGDOptions{.lr = 0.1, .momentum = 0.9}));
    expect_refused("momentum", make<fsdp::SGD>(fsdp::SGDOptions{.lr = 0.2}), "'momentum' was 0.9 when it was saved, and is 0 here");
    saved("amsgrad", make<fsdp::WrappedOptimizer>(fsdp::TorchOptimizerFactory([](auto shards) {
            return std::make_unique<torch::optim::AdamW>(shards, torch::optim::AdamWOptions(0.1).amsgrad(true));
          })));
    expect_refused("amsgrad", make<fsdp::AdamW>(fsdp::AdamWOptions{.lr = 0.2}), "'amsgrad' was true when it was saved, and is false here");
    Training model_only;
    fsdp::save(path("model"), *model_only.model);
    expect_refused("model", make<fsdp::AdamW>(fsdp::AdamWOptions{.lr = 0.2}),
                   "has no settings of an optimizer for parameter 'entry.weight'");
  });
}

// Python's schedules keep a base rate under a name of their own; flattened groups have each parameter's settings.
TEST_F(OptimizerSettings, OfPythonsComeBack) {
  for (const std::string layout : {"listed", "flattened"}) {
    fsdp::testing::run_peer(fsdp::testing::kStatePeer, {"settings", layout, path(layout)}, 2);
    run_ranks(2, [&] {
      torch::manual_seed(3);
      auto model = fsdp::testing::make_stack();
      model->register_buffer("counts", torch::zeros({3, 2}));
      fsdp::fully_shard(*model, {.units = fsdp::testing::stack_units()});
      fsdp::AdamW optimizer(*model, {.lr = 9}, {{.matches = begins("blocks.")}});
      fsdp::load(path(layout), *model, optimizer, {.optimizer_settings = true});
      EXPECT_EQ(optimizer.lr(), 0.5 * 0.125);
      EXPECT_EQ(optimizer.lr(0), 0.25 * 0.125);
      optimizer.set_lr_factor(1);
      EXPECT_EQ(optimizer.lr(), 0.5);
      EXPECT_EQ(optimizer.lr(0), 0.25);
      fsdp::save(path(layout + "-again"), *model, optimizer);
    });
    fsdp::testing::run_peer(fsdp::testing::kStatePeer, {"check_settings", path(layout + "-again")});
  }
}

}  // namespace optimizer_settings_test
