// Settings that one rank alone changes: the next collective fails on all ranks, and names the setting and both values.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>

#include "fsdp/fsdp.h"
#include "support/twins.h"

namespace fsdp {
namespace settings_of_ranks_test {

using testing::batch;
using testing::each_linear;
using testing::has;
using testing::line;
using testing::make_net;
using testing::message_of;
using testing::Net;

void step(Net& net, Optimizer& optimizer, int rank) {
  net.forward(batch(rank)).square().mean().backward();
  optimizer.step();
  optimizer.zero_grad();
}

/// After a step, `change` is made; the next forward must say both texts, on all ranks.
void expect_difference(const std::function<std::unique_ptr<Optimizer>(Net&, int rank)>& make,
                       const std::function<void(FSDPModule&, Optimizer&, int rank)>& change, const std::string& on_0,
                       const std::string& on_1) {
  testing::run_ranks(2, [&](int rank) {
    SCOPED_TRACE(on_0 + on_1);
    const auto net = make_net();
    auto sharded = fully_shard(*net, {.mesh = line(), .units = each_linear()});
    const auto optimizer = make(*net, rank);
    std::string message;
    for (int i = 0; i < 2 && message.empty(); ++i) {
      message = message_of([&] { step(*net, *optimizer, rank); });
      if (message == "no error") message.clear();
      change(sharded, *optimizer, rank);
    }
    if (message.empty()) message = message_of([&] { net->forward(batch(rank)); });
    EXPECT_TRUE(has(message, "the ranks make different calls: rank 0: ")) << message;
    EXPECT_TRUE(has(message, on_0)) << message;
    EXPECT_TRUE(has(message, on_1)) << message;
  });
}

void nothing(FSDPModule&, Optimizer&, int) {}

std::unique_ptr<Optimizer> sgd(Net& net, int) { return std::make_unique<SGD>(net, SGDOptions{.lr = 0.1}); }

TEST(SettingsOfRanks, OfOptimizers) {
  expect_difference([](Net& net, int rank) { return std::make_unique<AdamW>(net, AdamWOptions{.lr = rank == 0 ? 0.1 : 0.2}); }, nothing,
                    "after an update with lr 0.1;", "after an update with lr 0.2.");
  expect_difference([](Net& net, int rank) { return std::make_unique<AdamW>(net, AdamWOptions{.eps = rank == 0 ? 1e-8 : 1e-6}); }, nothing,
                    "after an update with eps 1e-08;", "after an update with eps 1e-06.");
  expect_difference(
      [](Net& net, int rank) { return std::make_unique<SGD>(net, SGDOptions{.lr = 0.1, .momentum = rank == 0 ? 0.9 : 0.95}); }, nothing,
      "after an update with momentum 0.9;", "after an update with momentum 0.95.");
  expect_difference(
      sgd, [](FSDPModule&, Optimizer& optimizer, int rank) { optimizer.set_lr_factor(rank == 0 ? 1 : 0.5); },
      "after an update with lr 0.1;", "after an update with lr 0.05.");
  const auto with_group = [](Net& net, int) {
    return std::make_unique<SGD>(net, SGDOptions{.lr = 0.1},
                                 std::vector<ParamGroup>{{.matches = [](const std::string& name) { return name == "third.bias"; }}});
  };
  expect_difference(
      with_group, [](FSDPModule&, Optimizer& optimizer, int rank) { optimizer.set_lr(0, rank == 0 ? 0.3 : 0.4); }, "base lr 0.3",
      "base lr 0.4");
  expect_difference(
      with_group, [](FSDPModule&, Optimizer& optimizer, int rank) { optimizer.set_lr_factor(0, rank == 0 ? 0.5 : 0.25); },
      "lr of group 0 0.05", "lr of group 0 0.025");
}

TEST(SettingsOfRanks, OfSetters) {
  const auto differ = [](const std::function<void(FSDPModule&)>& set, const std::string& on_0, const std::string& on_1) {
    expect_difference(
        sgd,
        [&](FSDPModule& sharded, Optimizer&, int rank) {
          if (rank == 1) set(sharded);
        },
        on_0, on_1);
  };
  differ([](FSDPModule& sharded) { sharded.set_requires_gradient_sync(false); }, "(requires_gradient_sync true)",
         "(requires_gradient_sync false)");
  differ([](FSDPModule& sharded) { sharded.set_gradient_divide_factor(4); }, "(gradient_divide_factor 0)", "(gradient_divide_factor 4)");
  differ([](FSDPModule& sharded) { sharded.set_reshard_after_forward(false); }, "(reshard_after_forward true)",
         "(reshard_after_forward false)");
  differ([](FSDPModule& sharded) { sharded.set_is_last_backward(false); }, "(is_last_backward true)", "(is_last_backward false)");
}

TEST(SettingsOfRanks, OfAGradScaler) {
  testing::run_ranks(2, [](int rank) {
    const auto net = make_net();
    fully_shard(*net, {.mesh = line(), .units = each_linear()});
    SGD optimizer(*net, {.lr = 0.1});
    GradScaler scaler({.init_scale = rank == 0 ? 2.0 : 4.0});
    scaler.scale(net->forward(batch(rank)).square().mean()).backward();
    const auto message = message_of([&] { scaler.step(optimizer); });
    EXPECT_TRUE(has(message, "GradScaler: the ranks have scaled their losses by other numbers, from 2.0")) << message;
    EXPECT_TRUE(has(message, "to 4.0")) << message;
  });
}

}  // namespace settings_of_ranks_test
}  // namespace fsdp
