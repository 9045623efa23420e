// Activation checkpointing: what is refused, and what an error leaves behind.

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <stdexcept>
#include <vector>

#include "fsdp/activation_checkpoint.h"
#include "fsdp/fsdp.h"
#include "support/twins.h"

namespace fsdp {
namespace activation_checkpoint_errors_test {

using testing::batch;
using testing::each_linear;
using testing::expect_same;
using testing::has;
using testing::line;
using testing::make_net;
using testing::message_of;
using testing::Net;
using testing::over_ranks;

using Results = std::vector<at::Tensor>;

/// Layers of Net with dropout, in checkpoints.
at::Tensor forward(Net& net, const at::Tensor& x) {
  const auto y = activation_checkpoint([&net](const at::Tensor& x) { return at::dropout(at::tanh(net.first(x)), 0.4, true); }, x);
  return activation_checkpoint([&net](const at::Tensor& x) { return net.third(at::gelu(net.second(x))); }, y);
}

TEST(CheckpointErrors, AnInputWrittenInPlaceIsTorchsError) {
  const auto net = make_net();
  const auto x = batch(0);
  auto loss = activation_checkpoint([&](const at::Tensor& x) { return net->first(x); }, x).sum();
  x.mul_(2);
  auto message = message_of<c10::Error>([&] { loss.backward(); });
  EXPECT_TRUE(has(message, "modified by an inplace operation")) << message;

  // By the function itself.
  loss = activation_checkpoint([&](at::Tensor x) { return net->first(x.mul_(2)); }, batch(0)).sum();
  message = message_of<c10::Error>([&] { loss.backward(); });
  EXPECT_TRUE(has(message, "modified by an inplace operation")) << message;
}

TEST(CheckpointErrors, AfterAStepIsAnError) {
  over_ranks([](int rank) {
    for (const auto& strategy : testing::all_strategies()) {
      const auto model = make_net();
      auto sharded = fully_shard(*model, {.mesh = line(), .units = each_linear(), .placements = Placements::from_name(strategy)});
      SGD optimizer(*model, {.lr = 0.1});
      const auto pass = [&] { return forward(*model, batch(rank)).square().mean(); };
      auto old = pass();
      pass().backward();
      optimizer.step();
      const auto message = message_of([&] { old.backward(); });
      EXPECT_TRUE(has(message, "was written between forward and backward")) << strategy << ": " << message;
      optimizer.zero_grad();
      pass().backward();
      EXPECT_TRUE(sharded.full_gradients()[0].second.defined());
    }
  });
}

TEST(CheckpointErrors, SecondDerivativesAreRefused) {
  const auto net = make_net();
  const auto x = batch(0).requires_grad_();
  const auto y = activation_checkpoint([&](const at::Tensor& x) { return at::tanh(net->first(x)); }, x).sum();
  const auto message = message_of([&] { torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true); });
  EXPECT_TRUE(has(message, "create_graph") && has(message, "without a checkpoint")) << message;
  y.backward();
  EXPECT_TRUE(x.grad().defined());
}

TEST(CheckpointErrors, AFunctionThatDiffersIsAnError) {
  const auto net = make_net();
  int calls = 0;
  const std::vector<std::function<std::vector<at::Tensor>(const at::Tensor&)>> functions = {
      [&](const at::Tensor& x) -> Results {
        return calls++ == 0 ? Results{net->first(x)} : Results{net->first(x), net->first(x)};
      },
      [&](const at::Tensor& x) -> Results { return {calls++ == 0 ? net->first(x) : x}; },
      [&](const at::Tensor& x) -> Results { return {calls++ == 0 ? net->first(x) : net->first(x) + net->second->bias}; },
      [&](const at::Tensor& x) -> Results { return {calls++ == 0 ? net->first(x) + net->second->bias : net->first(x)}; },
  };
  for (const auto& function : functions) {
    calls = 0;
    auto loss = activation_checkpoint(function, batch(0)).front().sum();
    const auto message = message_of([&] { loss.backward(); });
    EXPECT_TRUE(has(message, "must do the same each time")) << message;
  }
}

TEST(CheckpointErrors, ARepetitionThatThrowsLeavesNothingBehind) {
  over_ranks([](int rank) {
    for (const auto& strategy : testing::all_strategies()) {
      const auto model = make_net();
      auto sharded = fully_shard(*model, {.mesh = line(), .units = each_linear(), .placements = Placements::from_name(strategy)});
      const auto pass = [&] {
        torch::manual_seed(static_cast<std::uint64_t>(rank));
        forward(*model, batch(rank)).square().mean().backward();
      };
      pass();
      const auto expected = sharded.full_gradients();
      for (int k = 0; k < 2; ++k) {
        int calls = 0;
        auto y = activation_checkpoint(
            [&](const at::Tensor& x) {
              const auto h = at::tanh(model->first(x));
              if (calls++ > 0) throw std::runtime_error("out of luck");
              return h;
            },
            batch(rank));
        y = activation_checkpoint([&](const at::Tensor& x) { return model->third(model->second(x)); }, y);
        auto loss = y.sum();
        EXPECT_TRUE(has(message_of<std::exception>([&] { loss.backward(); }), "out of luck")) << strategy;
        EXPECT_FALSE(at::GradMode::is_enabled() && !at::autocast::is_autocast_cache_enabled());
        sharded.zero_grad();
        pass();
        expect_same(sharded.full_gradients(), expected, 0, strategy);
      }
    }
  });
}

}  // namespace activation_checkpoint_errors_test
}  // namespace fsdp
