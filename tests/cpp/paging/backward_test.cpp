// Every way in which autograd can be asked for gradients.

#include "paging/backward.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "fsdp/fsdp.h"
#include "support/twins.h"

namespace fsdp {
namespace backward_test {

using testing::batch;
using testing::each_linear;
using testing::expect_like_plain;
using testing::expect_same;
using testing::has;
using testing::line;
using testing::make_net;
using testing::message_of;
using testing::Net;
using testing::over_ranks;

using Results = std::vector<at::Tensor>;

std::shared_ptr<Net> new_net() { return std::make_shared<Net>(); }

TEST(Backward, TwiceThroughOneGraph) {
  over_ranks([] {
    expect_like_plain(new_net, each_linear(), [](Net& net, int rank) -> Results {
      auto loss = net.forward(batch(rank)).square().mean();
      loss.backward({}, /*retain_graph=*/true);
      loss.backward();
      EXPECT_THROW(loss.backward(), c10::Error);  // Torch's own: the graph is gone.
      return {};
    });
  });
}

TEST(Backward, TwoLossesOfOneForward) {
  over_ranks([] {
    expect_like_plain(new_net, each_linear(), [](Net& net, int rank) -> Results {
      const auto hidden = net.second(at::tanh(net.first(batch(rank))));
      auto early = hidden.square().mean();
      auto late = net.third(hidden).abs().mean();
      early.backward({}, /*retain_graph=*/true);
      late.backward();
      return {};
    });
  });
}

TEST(Backward, TwoForwardsThenTheirBackwards) {
  over_ranks([] {
    expect_like_plain(new_net, each_linear(), [](Net& net, int rank) -> Results {
      auto one = net.forward(batch(rank)).square().mean();
      auto two = net.forward(batch(rank + 10)).abs().mean();
      one.backward();
      auto three = net.forward(batch(rank + 20)).abs().mean();
      three.backward();
      two.backward();
      return {};
    });
  });
}

TEST(Backward, GradOfParametersIsThisRanksOwn) {
  over_ranks([] {
    expect_like_plain(new_net, each_linear(), [](Net& net, int rank) -> Results {
      const auto loss = net.forward(batch(rank)).square().mean();
      return torch::autograd::grad({loss}, net.parameters());
    });
  });
}

TEST(Backward, GradOfActivations) {
  over_ranks([] {
    expect_like_plain(new_net, each_linear(), [](Net& net, int rank) -> Results {
      const auto x = batch(rank).requires_grad_();
      const auto hidden = net.first(x);
      const auto y = net.third(at::gelu(net.second(at::tanh(hidden)))).square().mean();
      const auto gradients = torch::autograd::grad({y}, {x, hidden}, {}, /*retain_graph=*/true);
      y.backward();
      return {gradients[0], gradients[1], x.grad().clone()};
    });
  });
}

TEST(Backward, GradientPenalty) {
  over_ranks([] {
    expect_like_plain(new_net, each_linear(), [](Net& net, int rank) -> Results {
      const auto x = batch(rank).requires_grad_();
      const auto y = net.forward(x);
      const auto slope = torch::autograd::grad({y.sum()}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
      ((slope.norm() - 1).square() + y.square().mean()).backward();
      return {slope.detach()};
    });
  });
}

TEST(Backward, SecondDerivativesOfParameters) {
  over_ranks([] {
    expect_like_plain(new_net, each_linear(), [](Net& net, int rank) -> Results {
      const auto loss = net.forward(batch(rank)).square().mean();
      const auto first = torch::autograd::grad({loss}, net.parameters(), {}, /*retain_graph=*/true, /*create_graph=*/true);
      at::Tensor sum = loss;
      for (const auto& gradient : first) sum = sum + gradient.square().sum();
      sum.backward();
      return {first[0].detach()};
    });
  });
}

TEST(Backward, CreateGraphLeavesTheSameGradients) {
  over_ranks([] {
    expect_like_plain(
        [] {
          auto net = std::make_shared<Net>();
          return net;
        },
        each_linear(),
        [](Net& net, int rank) -> Results {
          auto loss = net.forward(batch(rank)).square().mean();
          loss.backward({}, /*retain_graph=*/true, /*create_graph=*/true);
          for (auto& parameter : net.parameters()) {
            if (parameter.grad().defined()) parameter.mutable_grad() = parameter.grad().detach();  // Breaks the cycle.
          }
          return {};
        });
  });
}

TEST(Backward, OfChosenParametersOnly) {
  over_ranks([] {
    expect_like_plain(new_net, each_linear(), [](Net& net, int rank) -> Results {
      const auto loss = net.forward(batch(rank)).square().mean();
      torch::autograd::backward({loss}, {}, {}, /*create_graph=*/false, {net.first->weight, net.third->bias});
      return {};
    });
  });
}

TEST(Backward, AUnitUsedTwice) {
  over_ranks([] {
    expect_like_plain(new_net, each_linear(), [](Net& net, int rank) -> Results {
      auto x = net.first(batch(rank));
      x = at::tanh(net.second(x));
      x = at::tanh(net.first(x.narrow(1, 0, 6)));
      x = net.third(net.second(net.second(x)));
      x.square().mean().backward();
      return {x.detach()};
    });
  });
}

TEST(Backward, UnusedParameters) {
  over_ranks([] {
    // A whole unit.
    expect_like_plain(new_net, each_linear(), [](Net& net, int rank) -> Results {
      net.second(net.first(batch(rank))).square().mean().backward();
      return {};
    });
    // One of a unit.
    expect_like_plain(new_net, each_linear(), [](Net& net, int rank) -> Results {
      batch(rank).matmul(net.first->weight.t()).square().mean().backward();
      return {};
    });
    // All.
    expect_like_plain(new_net, each_linear(), [](Net& net, int rank) -> Results {
      auto x = batch(rank).requires_grad_();
      x.square().sum().backward();
      return {};
    });
    // In some passes.
    expect_like_plain(new_net, each_linear(), [](Net& net, int rank) -> Results {
      for (int k = 0; k < 3; ++k) {
        auto x = at::tanh(net.first(batch(rank + k)));
        if (k != 1) x = net.second(x);
        net.third(x).square().mean().backward();
      }
      return {};
    });
  });
}

// The parameter is gathered on every rank, as others of its unit are used, but only one rank has a gradient for it.
TEST(Backward, AParameterUsedOnOneRankOnly) {
  over_ranks([] {
    expect_like_plain(new_net, each_linear(), [](Net& net, int rank) -> Results {
      auto x = batch(rank).matmul(net.first->weight.t());
      if (rank == 0) x = x + net.first->bias;
      net.third(net.second(x)).square().mean().backward();
      return {};
    });
  });
}

// [Order is collective] A whole unit that only one rank uses, or gets gradients for, can't be reduced: FSDP_DEBUG=1 says so at once.
TEST(Backward, AUnitUsedOnOneRankOnlyIsAnError) {
  testing::run_ranks(2, [](int rank) {
    const auto model = make_net();
    const auto sharded = fully_shard(*model, {.mesh = line(), .units = each_linear(), .prefetch_depth = 0});
    const auto message = message_of([&] {
      const auto x = at::tanh(model->first(batch(rank)));
      model->third(rank == 0 ? model->second(x) : x).square().mean().backward();
    });
    EXPECT_TRUE(has(message, "'second'") && has(message, "rank 0") && has(message, "rank 1")) << message;
  });
}

// Backward enters the unit on both ranks, which one of them has no gradient for: it counts as zero.
TEST(Backward, AUnitWithAGradientOnOneRankOnly) {
  const auto loss = [](Net& net, int batch_of, bool with_gradient) {
    const auto weight = with_gradient ? net.second->weight : net.second->weight.detach();
    const auto bias = with_gradient ? net.second->bias : net.second->bias.detach();
    const auto x = at::tanh(net.first(batch(batch_of).requires_grad_()));
    return net.third(torch::nn::functional::linear(x, weight, bias)).square().mean();
  };
  testing::run_ranks(2, [&](int rank) {
    const auto model = make_net();
    const auto sharded = fully_shard(*model, {.mesh = line(), .units = each_linear(), .prefetch_depth = 0});
    loss(*model, rank, rank == 0).backward();
    const auto plain = make_net();
    loss(*plain, 0, true).div(2).backward();
    for (const auto& [name, gradient] : sharded.full_gradients()) {
      if (name.starts_with("second.")) {
        EXPECT_TRUE(torch::allclose(gradient, plain->named_parameters()[name].grad(), 1e-5, 1e-7)) << name;
      }
    }
  });
}

TEST(Backward, FrozenParameters) {
  const auto frozen = [](std::vector<std::string> names) {
    return [names] {
      auto net = std::make_shared<Net>();
      for (auto& item : net->named_parameters()) {
        for (const auto& name : names) {
          if (item.key() == name) item.value().set_requires_grad(false);
        }
      }
      return net;
    };
  };
  over_ranks([&] {
    const auto run = [](Net& net, int rank) -> Results {
      net.forward(batch(rank)).square().mean().backward();
      return {};
    };
    expect_like_plain(frozen({"second.weight", "first.bias"}), each_linear(), run);
    expect_like_plain(frozen({"second.weight", "second.bias"}), each_linear(), run);
    expect_like_plain(frozen({"first.weight", "first.bias", "second.weight"}), {}, run);
  });
}

TEST(Backward, FrozenAfterSharding) {
  over_ranks([](int rank) {
    const auto model = make_net();
    auto sharded = fully_shard(*model, {.mesh = line(), .units = each_linear()});
    SGD optimizer(*model, {.lr = 0.1});
    const auto before = sharded.full_parameters();
    model->second->weight.set_requires_grad(false);
    model->forward(batch(rank)).square().mean().backward();
    EXPECT_FALSE(sharded.full_gradients()[2].second.defined());
    EXPECT_TRUE(sharded.full_gradients()[3].second.defined());
    optimizer.step();
    EXPECT_TRUE(torch::equal(sharded.full_parameters()[2].second, before[2].second));
    EXPECT_FALSE(torch::equal(sharded.full_parameters()[3].second, before[3].second));

    model->second->weight.set_requires_grad(true);
    optimizer.zero_grad();
    model->forward(batch(rank)).square().mean().backward();
    EXPECT_TRUE(sharded.full_gradients()[2].second.defined());
  });
}

TEST(Backward, UnfrozenAfterShardingIsAnError) {
  over_ranks([](int rank) {
    const auto model = make_net();
    model->second->weight.set_requires_grad(false);
    const auto sharded = fully_shard(*model, {.mesh = line(), .units = each_linear()});
    model->second->weight.set_requires_grad(true);
    auto loss = model->forward(batch(rank)).square().mean();
    const auto message = message_of([&] { loss.backward(); });
    EXPECT_TRUE(has(message, "'second.weight'") && has(message, "set requires_grad before sharding")) << message;
  });
}

TEST(Backward, ThroughAGraphFromBeforeAStepIsTorchsError) {
  over_ranks([](int rank) {
    for (const auto& strategy : testing::all_strategies()) {
      const auto model = make_net();
      auto sharded = fully_shard(*model, {.mesh = line(), .units = each_linear(), .placements = Placements::from_name(strategy)});
      SGD optimizer(*model, {.lr = 0.1});
      auto old = model->forward(batch(rank)).square().mean();
      model->forward(batch(rank)).square().mean().backward();
      optimizer.step();
      const auto message = message_of<c10::Error>([&] { old.backward(); });
      EXPECT_TRUE(has(message, "modified by an inplace operation")) << strategy << ": " << message;

      // And the next step is as if nothing had happened.
      optimizer.zero_grad();
      model->forward(batch(rank)).square().mean().backward();
      const auto gradients = sharded.full_gradients();
      sharded.zero_grad();
      model->forward(batch(rank)).square().mean().backward();
      expect_same(sharded.full_gradients(), gradients, 0, strategy);
    }
  });
}

TEST(Backward, ThroughAParameterWrittenInPlaceIsTorchsError) {
  over_ranks([](int rank) {
    const auto model = make_net();
    const auto sharded = fully_shard(*model, {.mesh = line(), .units = each_linear()});
    auto loss = model->forward(batch(rank)).square().mean();
    {
      const torch::NoGradGuard no_grad;
      model->second->weight.mul_(2);
    }
    const auto message = message_of<c10::Error>([&] { loss.backward(); });
    EXPECT_TRUE(has(message, "modified by an inplace operation")) << message;
    EXPECT_TRUE(has(message_of<c10::Error>([&] { model->second->weight.mul_(2); }), "leaf Variable that requires grad"));
  });
}

TEST(Backward, ThatFailsLeavesNothingBehind) {
  over_ranks([](int rank) {
    const auto mesh = line();
    const auto plain = make_net();
    for (int r = 0; r < mesh.size(); ++r) plain->forward(batch(r)).square().mean().backward();
    auto expected = testing::gradients_of(*plain);
    for (auto& [name, gradient] : expected) gradient = gradient / mesh.size();
    for (const auto& strategy : testing::all_strategies()) {
      const auto model = make_net();
      auto sharded = fully_shard(*model, {.mesh = mesh, .units = each_linear(), .placements = Placements::from_name(strategy)});
      for (int pass = 0; pass < 3; ++pass) {
        auto hidden = at::tanh(model->first(batch(rank)));
        hidden.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("out of luck"); });
        auto failing = model->third(at::gelu(model->second(hidden))).sum();
        EXPECT_TRUE(has(message_of<std::exception>([&] { failing.backward(); }), "out of luck")) << strategy;
        sharded.zero_grad();
        model->forward(batch(rank)).square().mean().backward();
        expect_same(sharded.full_gradients(), expected, mesh.size() == 1 ? 0 : 1e-5, strategy);
      }
    }
  });
}

/// Runs another backward inside of its own, as activation checkpointing does.
struct Recomputed : torch::autograd::Function<Recomputed> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, torch::nn::Linear* layer) {
    context->save_for_backward({x});
    context->saved_data["layer"] = reinterpret_cast<std::int64_t>(layer);
    return at::tanh((*layer)(x)).detach();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, torch::autograd::variable_list gradients) {
    const at::AutoGradMode with_grad(true);
    auto& layer = *reinterpret_cast<torch::nn::Linear*>(context->saved_data["layer"].toInt());
    auto x = context->get_saved_variables()[0].detach().requires_grad_();
    at::tanh(layer(x)).backward(gradients[0]);
    return {x.grad(), at::Tensor()};
  }
};

TEST(Backward, InsideOfABackward) {
  over_ranks([] {
    expect_like_plain(new_net, each_linear(), [](Net& net, int rank) -> Results {
      const auto x = batch(rank).requires_grad_();
      const auto y = net.third(Recomputed::apply(Recomputed::apply(x, &net.first), &net.second));
      y.square().mean().backward();
      return {y.detach(), x.grad().clone()};
    });
  });
}

TEST(Backward, HooksOnParametersSeeThisRanksGradient) {
  over_ranks([] {
    expect_like_plain(
        [] {
          auto net = std::make_shared<Net>();
          net->second->weight.register_hook([](const at::Tensor& gradient) { return gradient * 3; });
          return net;
        },
        each_linear(),
        [](Net& net, int rank) -> Results {
          net.forward(batch(rank)).square().mean().backward();
          return {};
        });
  });
}

TEST(Backward, AccumulatesUntilZeroGrad) {
  over_ranks([](int rank) {
    const auto mesh = line();
    const auto plain = make_net();
    for (int r = 0; r < mesh.size(); ++r) {
      for (int micro = 0; micro < 3; ++micro) plain->forward(batch(r + 10 * micro)).square().mean().backward();
    }
    auto expected = testing::gradients_of(*plain);
    for (auto& [name, gradient] : expected) gradient = gradient / mesh.size();
    for (const bool sync : {true, false}) {
      for (const auto& strategy : testing::all_strategies()) {
        const auto model = make_net();
        auto sharded = fully_shard(*model, {.mesh = mesh, .units = each_linear(), .placements = Placements::from_name(strategy)});
        for (int pass = 0; pass < 2; ++pass) {
          sharded.zero_grad();
          for (int micro = 0; micro < 3; ++micro) {
            sharded.set_requires_gradient_sync(sync || micro == 2);
            model->forward(batch(rank + 10 * micro)).square().mean().backward();
          }
          expect_same(sharded.full_gradients(), expected, 1e-5, strategy);
        }
        EXPECT_FALSE(model->first->weight.grad().defined());
        sharded.zero_grad();
        for (const auto& [name, gradient] : sharded.full_gradients()) EXPECT_FALSE(gradient.defined()) << name;
      }
    }
  });
}

// "The next backward starts from zero", whatever was left unreduced.
TEST(Backward, ZeroGradDropsUnreducedGradients) {
  over_ranks([](int rank) {
    for (const auto& strategy : testing::all_strategies()) {
      const auto model = make_net();
      auto sharded = fully_shard(*model, {.mesh = line(), .units = each_linear(), .placements = Placements::from_name(strategy)});
      model->forward(batch(rank)).square().mean().backward();
      const auto expected = sharded.full_gradients();
      sharded.zero_grad();
      sharded.set_requires_gradient_sync(false);
      model->forward(batch(rank + 10)).square().mean().backward();
      sharded.zero_grad();
      sharded.set_requires_gradient_sync(true);
      model->forward(batch(rank)).square().mean().backward();
      expect_same(sharded.full_gradients(), expected, 0, strategy);
    }
  });
}

// A gradient from before fully_shard counts, as it would without.
TEST(Backward, AddsToAGradientFromBeforeSharding) {
  over_ranks([](int rank) {
    const auto mesh = line();
    const auto plain = make_net();
    for (int r = 0; r < mesh.size(); ++r) {
      plain->forward(batch(r)).sum().backward();
      plain->forward(batch(r)).square().mean().backward();
    }
    auto expected = testing::gradients_of(*plain);
    for (auto& [name, gradient] : expected) gradient = gradient / mesh.size();
    const auto model = make_net();
    model->forward(batch(rank)).sum().backward();
    auto sharded = fully_shard(*model, {.mesh = mesh, .units = each_linear()});
    model->forward(batch(rank)).square().mean().backward();
    expect_same(sharded.full_gradients(), expected, 1e-5, "both");
  });
}

}  // namespace backward_test
}  // namespace fsdp
