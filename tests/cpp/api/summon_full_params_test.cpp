// Parameters that are whole for a while, and sharded again afterwards.

#include "fsdp/summon_full_params.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "fsdp/fsdp.h"
#include "support/collected_warnings.h"
#include "support/shardings.h"
#include "support/stack.h"
#include "support/twins.h"

namespace fsdp {
namespace summon_full_params_test {

using testing::batch;
using testing::each_linear;
using testing::expect_same;
using testing::has;
using testing::line;
using testing::make_net;
using testing::message_of;
using testing::Net;
using testing::over_ranks;
using testing::run_ranks;
using testing::values_of;

/// Calls fn(model, handle, strategy) on two ranks, for each strategy.
void over_strategies(const std::function<void(const std::shared_ptr<Net>&, FSDPModule&, const std::string&)>& fn) {
  run_ranks(2, [&] {
    const auto mesh = line();
    for (const auto& strategy : testing::all_strategies()) {
      const auto model = make_net();
      auto sharded = fully_shard(*model, {.mesh = mesh, .units = each_linear(), .placements = Placements::from_name(strategy)});
      fn(model, sharded, strategy);
    }
  });
}

bool is_sharded(const std::string& strategy) { return strategy == "optim_grads_params"; }

void expect_sharded(const Net& model, const std::string& strategy) {
  if (!is_sharded(strategy)) return;
  for (const auto& parameter : model.parameters()) EXPECT_THROW(parameter.data_ptr(), c10::Error) << strategy;
}

TEST(SummonFullParams, ReadByPointers) {
  over_strategies([](const auto& model, FSDPModule& sharded, const std::string& strategy) {
    const auto plain = make_net();
    const auto before = sharded.memory_stats().gathered_parameters.live;
    {
      const SummonFullParams whole(*model);
      const auto parameters = model->parameters();
      const auto expected = plain->parameters();
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        const auto seen = at::from_blob(parameters[i].data_ptr(), parameters[i].sizes(), at::kFloat);
        EXPECT_TRUE(torch::equal(seen, expected[i])) << strategy;
      }
    }
    expect_sharded(*model, strategy);
    EXPECT_EQ(sharded.memory_stats().gathered_parameters.live, before) << strategy;
    expect_same(sharded.full_parameters(), values_of(*plain), 0, strategy);
  });
}

TEST(SummonFullParams, WhatIsWrittenStays) {
  over_strategies([](const auto& model, FSDPModule& sharded, const std::string& strategy) {
    const auto plain = make_net();
    const torch::NoGradGuard no_grad;
    const auto change = [](Net& net) {
      net.first->weight.data_ptr<float>()[59] = 7;
      net.third->bias.mul_(3).add_(net.second->bias[0]);  // an operator over several units
      net.second->weight.data_ptr<float>()[0] = -1;
    };
    change(*plain);
    {
      const SummonFullParams whole(*model);
      change(*model);
      expect_same(values_of(*model), values_of(*plain), 0, strategy);
    }
    expect_sharded(*model, strategy);
    for (const auto& shard : sharded.parameter_shards()) {
      const auto expected = plain->named_parameters()[shard.name].view(-1).narrow(0, shard.offset, shard.value.numel());
      EXPECT_TRUE(torch::equal(shard.value, expected)) << strategy << " " << shard.name;
    }
    EXPECT_TRUE(torch::equal(model->forward(batch(0)), plain->forward(batch(0)))) << strategy;
    expect_same(sharded.full_parameters(), values_of(*plain), 0, strategy);
  });
}

// torch::load gives parameters other memory: what lies there is what was written.
TEST(SummonFullParams, WhatIsLoadedStays) {
  over_strategies([](const auto& model, FSDPModule& sharded, const std::string& strategy) {
    torch::manual_seed(77);
    const auto other = std::make_shared<Net>();
    std::stringstream file;
    torch::save(other, file);
    {
      const SummonFullParams whole(*model);
      auto target = model;
      torch::load(target, file);
    }
    expect_sharded(*model, strategy);
    expect_same(sharded.full_parameters(), values_of(*other), 0, strategy);
    EXPECT_TRUE(torch::equal(model->forward(batch(0)), other->forward(batch(0)))) << strategy;
    {
      const SummonFullParams whole(*model, {.writeback = false});
      model->first->weight.set_data(at::zeros({10, 6}));
    }
    expect_same(sharded.full_parameters(), values_of(*other), 0, strategy);
    {
      const testing::CollectedWarnings warnings;
      {
        const SummonFullParams whole(*model);
        model->first->weight.set_data(at::full({10, 6}, 0.5, at::kDouble));
      }
      EXPECT_TRUE(testing::has(warnings.text(), "'first.weight' was converted to Double; its value is taken over")) << warnings.text();
    }
    EXPECT_EQ(model->first->weight.scalar_type(), at::kFloat);
    EXPECT_TRUE(torch::equal(sharded.full_parameters()[0].second, at::full({10, 6}, 0.5)));
  });
}

TEST(SummonFullParams, WhatIsWrittenIsDropped) {
  over_strategies([](const auto& model, FSDPModule& sharded, const std::string& strategy) {
    const auto plain = make_net();
    const torch::NoGradGuard no_grad;
    // This stays: it was written before, and nothing has evicted the unit yet.
    model->second->bias.fill_(2);
    plain->second->bias.fill_(2);
    {
      const SummonFullParams whole(*model, {.writeback = false});
      EXPECT_EQ(model->second->bias[3].template item<float>(), 2);
      model->first->weight.template data_ptr<float>()[0] = 100;
      model->second->weight.fill_(5);
      EXPECT_EQ(model->second->weight.sum().template item<float>(), 500) << strategy;
    }
    expect_same(sharded.full_parameters(), values_of(*plain), 0, strategy);
    EXPECT_TRUE(torch::equal(model->forward(batch(0)), plain->forward(batch(0)))) << strategy;
  });
}

// Where ranks write differently, each keeps its slice, and all agree afterwards.
TEST(SummonFullParams, EachRankKeepsItsSlice) {
  over_strategies([](const auto& model, FSDPModule& sharded, const std::string& strategy) {
    if (strategy == "no_shard") return;  // there, each rank's parameters are its own
    const auto mesh = line();
    {
      const SummonFullParams whole(*model);
      for (const auto& parameter : model->parameters()) {
        at::from_blob(parameter.data_ptr(), parameter.sizes(), at::kFloat).fill_(mesh.rank() + 1);
      }
    }
    for (const auto& shard : sharded.parameter_shards()) {
      EXPECT_TRUE(torch::equal(shard.value, at::full_like(shard.value, mesh.rank() + 1))) << strategy;
    }
    for (const auto& [name, value] : sharded.full_parameters()) {
      EXPECT_EQ(mesh.sum(value.sum().template item<double>()), 2 * value.sum().template item<double>()) << strategy << " " << name;
    }
  });
}

TEST(SummonFullParams, OnRank0Only) {
  over_strategies([](const auto& model, FSDPModule& sharded, const std::string& strategy) {
    const auto plain = make_net();
    const auto mesh = line();
    {
      const SummonFullParams whole(*model, {.writeback = false, .rank0_only = true});
      if (mesh.rank() == 0) {
        // Alone: nothing here is a collective.
        std::stringstream file;
        torch::save(model->parameters(), file);
        std::vector<at::Tensor> loaded;
        torch::load(loaded, file);
        const auto expected = plain->parameters();
        for (std::size_t i = 0; i < loaded.size(); ++i) EXPECT_TRUE(torch::equal(loaded[i], expected[i])) << strategy;
        const torch::NoGradGuard no_grad;
        EXPECT_TRUE(torch::equal(model->forward(batch(0)), plain->forward(batch(0)))) << strategy;
        model->first->weight.zero_();
      } else {
        expect_sharded(*model, strategy);
        if (is_sharded(strategy)) {
          EXPECT_EQ(sharded.memory_stats().gathered_parameters.live, 0);
        }
      }
    }
    expect_sharded(*model, strategy);
    expect_same(sharded.full_parameters(), values_of(*plain), 0, strategy);
    model->forward(batch(mesh.rank())).square().mean().backward();
  });
}

TEST(SummonFullParams, PartsOfAModel) {
  run_ranks(2, [] {
    auto model = testing::make_stack({.nested = true});
    auto sharded = fully_shard(*model, {.mesh = line(), .units = testing::stack_units()});
    const auto present = [](const at::Tensor& parameter) {
      try {
        return parameter.data_ptr() != nullptr;
      } catch (const c10::Error&) {
        return false;
      }
    };
    auto& pair = model->blocks->at<testing::StackPairImpl>(1);
    const auto& other = model->blocks->at<testing::StackPairImpl>(0);
    {
      const SummonFullParams whole(pair);
      EXPECT_TRUE(present(pair.gain) && present(pair.first->up->weight) && present(pair.second->down->bias));
      EXPECT_FALSE(present(model->entry->weight) || present(other.gain) || present(other.first->up->weight));
    }
    {
      const SummonFullParams own(pair, {.recurse = false});
      EXPECT_TRUE(present(pair.gain));
      EXPECT_FALSE(present(pair.first->up->weight));
    }
    {
      // Not a unit: its parameters are the root's, which comes with them.
      const SummonFullParams entry(*model->entry);
      EXPECT_TRUE(present(model->entry->weight) && present(model->head->weight));
      EXPECT_FALSE(present(pair.gain));
    }
    EXPECT_FALSE(present(model->entry->weight) || present(pair.gain));
  });
}

TEST(SummonFullParams, NestedGuards) {
  over_strategies([](const auto& model, FSDPModule& sharded, const std::string& strategy) {
    const auto plain = make_net();
    const torch::NoGradGuard no_grad;
    {
      const SummonFullParams outer(*model->second);
      {
        const SummonFullParams inner(*model, {.writeback = false});
        model->second->bias.fill_(4);
        model->first->bias.fill_(4);
      }
      EXPECT_EQ(model->second->bias[9].template item<float>(), 4);
      EXPECT_NO_THROW(model->second->bias.data_ptr());
    }
    plain->second->bias.fill_(4);  // kept, as the outer guard says
    expect_same(sharded.full_parameters(), values_of(*plain), 0, strategy);
  });
}

TEST(SummonFullParams, OperatorsInsideGatherNothing) {
  over_strategies([](const auto& model, FSDPModule& sharded, const std::string& strategy) {
    const auto plain = make_net();
    const torch::NoGradGuard no_grad;
    const SummonFullParams whole(*model, {.writeback = false});
    sharded.reset_wire_stats();
    for (int pass = 0; pass < 2; ++pass) {
      EXPECT_TRUE(torch::equal(model->forward(batch(0)), plain->forward(batch(0)))) << strategy;
      for (const auto& parameter : model->parameters()) EXPECT_NO_THROW(parameter.data_ptr()) << strategy;
    }
    EXPECT_EQ(sharded.wire_stats().all_gathers, 0);
  });
}

TEST(SummonFullParams, BetweenTrainingSteps) {
  run_ranks(2, [](int rank) {
    const auto mesh = line();
    for (const auto& strategy : testing::all_strategies()) {
      const auto quiet = make_net();
      const auto model = make_net();
      auto reference = fully_shard(*quiet, {.mesh = mesh, .units = each_linear(), .placements = Placements::from_name(strategy)});
      auto sharded = fully_shard(*model, {.mesh = mesh, .units = each_linear(), .placements = Placements::from_name(strategy)});
      AdamW quiet_optimizer(*quiet);
      AdamW optimizer(*model);
      for (int step = 0; step < 3; ++step) {
        quiet_optimizer.zero_grad();
        optimizer.zero_grad();
        quiet->forward(batch(rank)).square().mean().backward();
        auto loss = model->forward(batch(rank)).square().mean();
        { const SummonFullParams whole(*model, {.writeback = false}); }  // between forward and backward
        loss.backward();
        { const SummonFullParams whole(*model); }
        quiet_optimizer.step();
        optimizer.step();
        { const SummonFullParams whole(*model, {.writeback = false, .rank0_only = true}); }
        expect_same(sharded.full_parameters(), reference.full_parameters(), 0, strategy);
      }
    }
  });
}

TEST(SummonFullParams, Refusals) {
  over_strategies([](const auto& model, FSDPModule& sharded, const std::string& strategy) {
    EXPECT_TRUE(has(message_of([&] { SummonFullParams guard(*model, {.rank0_only = true}); }), "set writeback to false"));
    torch::nn::Linear plain(2, 2);
    EXPECT_TRUE(has(message_of([&] { SummonFullParams guard(*plain); }), "no sharded parameters"));
    EXPECT_TRUE(has(message_of([&] { SummonFullParams guard(*model, {.recurse = false}); }), "of its own"));
    SGD optimizer(*model, {.lr = 0.1});
    model->forward(batch(0)).square().mean().backward();
    {
      const SummonFullParams whole(*model);
      EXPECT_TRUE(has(message_of([&] { optimizer.step(); }), "SummonFullParams keeps unit"));
      EXPECT_TRUE(has(message_of([&] { sharded.parameter_shards(); }), "end the guard's scope first"));
      EXPECT_TRUE(has(message_of([&] { fully_unshard(*model); }), "SummonFullParams keeps unit"));
      auto loss = model->forward(batch(0)).square().mean();
      EXPECT_TRUE(has(message_of([&] { loss.backward(); }), "a backward while SummonFullParams")) << strategy;
    }
    {
      auto hidden = model->first(batch(0));
      hidden.register_hook([&](const at::Tensor& gradient) {
        EXPECT_TRUE(has(message_of([&] { SummonFullParams guard(*model); }), "inside of a backward")) << strategy;
        return gradient;
      });
      model->second(hidden).sum().backward();
    }
    sharded.zero_grad();
    model->forward(batch(0)).square().mean().backward();
    optimizer.step();
  });
}

TEST(SummonFullParams, AWriteOutdatesGraphs) {
  over_strategies([](const auto& model, FSDPModule&, const std::string& strategy) {
    auto loss = model->forward(batch(0)).square().mean();
    { const SummonFullParams whole(*model); }
    EXPECT_TRUE(has(message_of<c10::Error>([&] { loss.backward(); }), "modified by an inplace operation")) << strategy;
    model->forward(batch(0)).square().mean().backward();
  });
}

// Main parameters, to their last digit, whatever the parameters compute and travel in.
TEST(SummonFullParams, MainParametersOfEverySharding) {
  const auto change = [](Net& net) {
    const torch::NoGradGuard no_grad;
    net.first->weight.add_(1e-6);  // less than bfloat16 shows
    net.second->weight.data_ptr<float>()[57] = 1.2345678F;
    net.second->bias.data_ptr<float>()[9] = 0.1F;  // frozen
  };
  over_ranks([&](int rank) {
    for (const auto& [name, options, compute] : testing::shardings(each_linear(), "second")) {
      const auto plain = make_net();
      const auto model = make_net();
      model->second->bias.set_requires_grad(false);
      auto sharded = fully_shard(*model, options);
      model->forward(batch(rank).to(compute));  // some units are present, or kept by neighbours
      const auto frozen = model->second->bias.scalar_type();
      for (const bool writeback : {false, true}) {
        {
          const SummonFullParams whole(*model, {.writeback = writeback});
          expect_same(values_of(*model), values_of(*plain), 0, name);
          change(*model);
        }
        if (writeback) change(*plain);
        EXPECT_EQ(model->first->weight.scalar_type(), compute) << name;
        EXPECT_EQ(model->second->bias.scalar_type(), frozen) << name;
        expect_same(sharded.full_parameters(), values_of(*plain), 0, name);
      }
      const torch::NoGradGuard no_grad;
      if (compute == at::kFloat && !options.gather_format) {
        EXPECT_TRUE(torch::equal(model->forward(batch(rank)), plain->forward(batch(rank)))) << name;
      } else {
        EXPECT_TRUE(torch::allclose(model->forward(batch(rank).to(compute)).to(at::kFloat), plain->forward(batch(rank)), 0.1, 0.1)) << name;
      }
    }
  });
}

TEST(SummonFullParams, TrainsOnInEverySharding) {
  over_ranks([](int rank) {
    for (const auto& [name, options, compute] : testing::shardings(each_linear(), "second")) {
      const auto quiet = make_net();
      const auto model = make_net();
      auto reference = fully_shard(*quiet, options);
      auto sharded = fully_shard(*model, options);
      AdamW quiet_optimizer(*quiet);
      AdamW optimizer(*model);
      for (int step = 0; step < 2; ++step) {
        quiet_optimizer.zero_grad();
        optimizer.zero_grad();
        quiet->forward(batch(rank).to(compute)).square().mean().backward();
        auto loss = model->forward(batch(rank).to(compute)).square().mean();
        { const SummonFullParams whole(*model, {.writeback = false}); }
        loss.backward();
        { const SummonFullParams whole(*model); }
        reference.main_parameters_changed();  // Behind a write, gathers of differences send parameters.
        quiet_optimizer.step();
        optimizer.step();
      }
      expect_same(sharded.full_parameters(), reference.full_parameters(), 0, name);
    }
  });
}

TEST(SummonFullParams, ModelsOfDeferredInit) {
  run_ranks(2, [] {
    const auto plain = make_net();
    torch::manual_seed(1);
    const auto model = deferred_init([] { return std::make_shared<Net>(); });
    EXPECT_TRUE(has(message_of([&] { SummonFullParams guard(*model); }), "no sharded parameters"));
    const auto sharded = fully_shard(*model, {.mesh = line(), .units = each_linear()});
    const SummonFullParams whole(*model);
    expect_same(values_of(*model), values_of(*plain), 0, "whole");
  });
}

}  // namespace summon_full_params_test
}  // namespace fsdp
