// Training with units of several modules, and with parameters that are left out: against the same model unsharded.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/fsdp.h"
#include "support/twins.h"

namespace fsdp {
namespace unit_groups_test {

using testing::all_strategies;
using testing::batch;
using testing::each_linear;
using testing::expect_same;
using testing::line;
using testing::make_net;
using testing::NamedTensors;
using testing::Net;
using testing::over_ranks;
using testing::values_of;

constexpr double kLr = 0.1;

at::Tensor loss_of(Net& net, int step, int rank) { return net.forward(batch(rank + 10 * step)).square().mean(); }

/// One step of SGD on the whole model and all ranks' data. Returns this rank's loss, and the gradients.
std::pair<double, NamedTensors> plain_step(Net& net, int step, int rank, int ranks) {
  double own = 0;
  for (int r = 0; r < ranks; ++r) {
    const auto loss = loss_of(net, step, r);
    if (r == rank) own = loss.item<double>();
    (loss / ranks).backward();
  }
  auto gradients = testing::gradients_of(net);
  const torch::NoGradGuard no_grad;
  for (auto& parameter : net.parameters()) {
    parameter.sub_(parameter.grad(), kLr);
    parameter.mutable_grad() = at::Tensor();
  }
  return {own, gradients};
}

TEST(UnitGroups, TrainLikeTheUnshardedModel) {
  over_ranks([](int rank) {
    const auto mesh = line();
    const int ranks = static_cast<int>(mesh.size());
    const double tolerance = ranks == 1 ? 0 : 1e-6;
    const std::vector<std::vector<std::vector<std::string>>> divisions = {
        {{"first", "third"}}, {{"second", "third"}}, {{"first", "second", "third"}}, {{"third", "first"}, {"second"}}};
    for (const auto& groups : divisions) {
      for (const auto& strategy : all_strategies()) {
        for (const int prefetch_depth : {0, 1}) {
          const auto plain = make_net();
          const auto model = make_net();
          auto sharded = fully_shard(*model, {.mesh = mesh,
                                              .units = each_linear(),
                                              .unit_groups = groups,
                                              .placements = Placements::from_name(strategy),
                                              .prefetch_depth = prefetch_depth});
          SGD optimizer(*model, {.lr = kLr});
          for (int step = 0; step < 3; ++step) {
            const auto what = groups[0][0] + "+..., " + strategy + ", step " + std::to_string(step);
            const auto loss = loss_of(*model, step, rank);
            loss.backward();
            const auto [expected, gradients] = plain_step(*plain, step, rank, ranks);
            EXPECT_NEAR(loss.item<double>(), expected, tolerance) << what;
            expect_same(sharded.full_gradients(), gradients, tolerance, what);
            optimizer.step();
            optimizer.zero_grad();
            expect_same(sharded.full_parameters(), values_of(*plain), tolerance, what);
          }
        }
      }
    }
  });
}

/// Using one module gathers all of its group, in one collective, and no other unit.
TEST(UnitGroups, AreGatheredAndFreedTogether) {
  testing::run_ranks(2, [] {
    const auto model = make_net();
    auto sharded = fully_shard(*model, {.mesh = line(), .units = each_linear(), .unit_groups = {{"first", "third"}}, .prefetch_depth = 0});
    ASSERT_EQ(sharded.units().size(), 3U);  // the root has no parameters of its own
    const auto present = [](const torch::nn::Linear& module) {
      try {
        return module->weight.data_ptr() != nullptr;
      } catch (const c10::Error&) {
        return false;
      }
    };
    sharded.reset_wire_stats();
    model->first->weight.sum();
    EXPECT_EQ(sharded.wire_stats().all_gathers, 1);
    EXPECT_TRUE(present(model->first) && present(model->third));
    EXPECT_FALSE(present(model->second));
    model->second->weight.sum();
    EXPECT_EQ(sharded.wire_stats().all_gathers, 2);
    EXPECT_FALSE(present(model->first) || present(model->third));
    EXPECT_TRUE(present(model->second));
    // The handles of both modules are for the same unit.
    EXPECT_EQ(handle(*model->first).unit(), handle(*model->third).unit());
  });
}

/// What is ignored stays the caller's: gradients to be averaged, parameters to be updated.
TEST(Ignored, TrainLikeTheUnshardedModel) {
  over_ranks([](int rank) {
    const auto mesh = line();
    const int ranks = static_cast<int>(mesh.size());
    const double tolerance = ranks == 1 ? 0 : 1e-6;
    const auto is_ignored = [](const std::string& name) { return name == "second.weight" || name == "third.bias"; };
    for (const auto& strategy : all_strategies()) {
      const auto plain = make_net();
      const auto model = make_net();
      auto sharded = fully_shard(*model, {.mesh = mesh,
                                          .units = each_linear(),
                                          .ignore = [&](const std::string& name, const at::Tensor&) { return is_ignored(name); },
                                          .placements = Placements::from_name(strategy)});
      SGD optimizer(*model, {.lr = kLr});
      const auto sharded_ones = [&](const NamedTensors& tensors, bool ignored) {
        NamedTensors chosen;
        for (const auto& item : tensors) {
          if (is_ignored(item.first) == ignored) chosen.push_back(item);
        }
        return chosen;
      };
      for (int step = 0; step < 3; ++step) {
        const auto what = strategy + ", step " + std::to_string(step);
        const auto loss = loss_of(*model, step, rank);
        loss.backward();
        const auto [expected, gradients] = plain_step(*plain, step, rank, ranks);
        EXPECT_NEAR(loss.item<double>(), expected, tolerance) << what;
        expect_same(sharded.full_gradients(), sharded_ones(gradients, false), tolerance, what);
        {
          const torch::NoGradGuard no_grad;
          for (auto& item : model->named_parameters()) {
            if (!is_ignored(item.key())) continue;
            // This rank's own gradient, in the ordinary place; averaged here by hand.
            auto& parameter = item.value();
            ASSERT_TRUE(parameter.grad().defined()) << item.key();
            auto mean = parameter.grad().clone();
            for (std::int64_t k = 0; k < mean.numel(); ++k) {
              mean.view(-1)[k] = mesh.sum(mean.view(-1)[k].item<double>()) / ranks;
            }
            parameter.sub_(mean, kLr);
            parameter.mutable_grad() = at::Tensor();
          }
        }
        optimizer.step();
        optimizer.zero_grad();
        expect_same(sharded.full_parameters(), sharded_ones(values_of(*plain), false), tolerance, what);
        expect_same(sharded_ones(values_of(*model), true), sharded_ones(values_of(*plain), true), tolerance, what);
      }
      // Neither steps nor un-sharding touch it otherwise.
      const auto before = model->second->weight.detach().clone();
      const auto* memory = model->second->weight.data_ptr();
      fully_unshard(*model);
      EXPECT_EQ(model->second->weight.data_ptr(), memory);
      EXPECT_TRUE(torch::equal(model->second->weight, before));
    }
  });
}

}  // namespace unit_groups_test
}  // namespace fsdp
