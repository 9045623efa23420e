// Operators find their parameters present, whatever operator it is and wherever it is called from.

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/profiler_kineto.h>
#include <torch/torch.h>

#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "fsdp/fsdp.h"
#include "support/twins.h"

namespace fsdp {
namespace trap_test {

namespace F = torch::nn::functional;
using testing::batch;
using testing::each_linear;
using testing::expect_like_plain;
using testing::expect_same;
using testing::line;
using testing::make_net;
using testing::Net;
using testing::normal;
using testing::over_ranks;

using Results = std::vector<at::Tensor>;

std::shared_ptr<Net> new_net() { return std::make_shared<Net>(); }

TEST(Trap, ParametersTouchedOutsideTheirModule) {
  over_ranks([] {
    expect_like_plain(new_net, each_linear(), [](Net& net, int rank) -> Results {
      const auto hidden = F::linear(batch(rank), net.first->weight, net.second->bias);
      const auto y = F::linear(hidden, net.second->weight.t(), net.first->bias) + net.third->weight.sum();
      y.square().mean().backward();
      return {y.detach()};
    });
  });
}

TEST(Trap, PenaltyOnAllParameters) {
  over_ranks([] {
    expect_like_plain(new_net, each_linear(), [](Net& net, int rank) -> Results {
      auto loss = net.forward(batch(rank)).square().mean();
      for (const auto& parameter : net.parameters()) loss = loss + 0.1 * parameter.square().sum();
      loss.backward();
      return {loss.detach()};
    });
    expect_like_plain(new_net, each_linear(), [](Net& net, int) -> Results {
      net.parameters()[0].norm().backward();
      return {};
    });
  });
}

TEST(Trap, OperatorsOfSeveralUnits) {
  over_ranks([] {
    expect_like_plain(new_net, each_linear(), [](Net& net, int) -> Results {
      const auto wide = at::cat({net.first->weight, net.second->weight, net.third->weight.t()}, 1);
      const auto narrow = at::stack({net.first->bias, net.second->bias});
      const auto norms = torch::_foreach_norm(net.parameters());
      const auto picked = net.second->weight.index({torch::tensor({1, 4})});
      const auto loss = wide.square().sum() + narrow.prod() + at::stack(norms).sum() + picked.exp().sum() +
                        at::einsum("ij,jk,ik->", {net.second->weight, net.first->weight, net.first->weight});
      loss.backward();
      return {loss.detach()};
    });
  });
}

struct Recurrent : torch::nn::Module {
  Recurrent()
      : lstm(register_module("lstm", torch::nn::LSTM(torch::nn::LSTMOptions(6, 5).num_layers(2).bidirectional(true)))),
        gru(register_module("gru", torch::nn::GRU(torch::nn::GRUOptions(10, 4).num_layers(2)))),
        rnn(register_module("rnn", torch::nn::RNN(torch::nn::RNNOptions(4, 3)))),
        cell(register_module("cell", torch::nn::LSTMCell(3, 2))) {}
  at::Tensor forward(const at::Tensor& x) {
    const auto y = std::get<0>(rnn(std::get<0>(gru(std::get<0>(lstm(x))))));
    return std::get<0>(cell(y[0]));
  }
  torch::nn::LSTM lstm;
  torch::nn::GRU gru;
  torch::nn::RNN rnn;
  torch::nn::LSTMCell cell;
};

TEST(Trap, RecurrentModules) {
  testing::run_ranks(2, [] {
    for (const auto& units :
         {UnitPredicate{}, each<torch::nn::LSTMImpl, torch::nn::GRUImpl, torch::nn::RNNImpl, torch::nn::LSTMCellImpl>()}) {
      expect_like_plain([] { return std::make_shared<Recurrent>(); }, units,
                        [](Recurrent& model, int rank) -> Results {
                          const auto y = model.forward(normal({3, 2, 6}, static_cast<std::uint64_t>(rank)));
                          y.square().mean().backward();
                          return {y.detach()};
                        });
    }
  });
}

struct Attention : torch::nn::Module {
  Attention()
      : same(register_module("same", torch::nn::MultiheadAttention(torch::nn::MultiheadAttentionOptions(8, 2).add_bias_kv(true)))),
        cross(register_module("cross", torch::nn::MultiheadAttention(torch::nn::MultiheadAttentionOptions(8, 2).kdim(6).vdim(6)))),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})))) {}
  at::Tensor forward(const at::Tensor& x, const at::Tensor& key, const at::Tensor& value) {
    const auto y = norm(std::get<0>(same(x, x, x)));
    return std::get<0>(cross(y, key, value));
  }
  torch::nn::MultiheadAttention same, cross;
  torch::nn::LayerNorm norm;
};

TEST(Trap, MultiheadAttention) {
  over_ranks([] {
    expect_like_plain([] { return std::make_shared<Attention>(); }, each<torch::nn::MultiheadAttentionImpl>(),
                      [](Attention& model, int rank) -> Results {
                        const auto seed = static_cast<std::uint64_t>(rank) * 3;
                        const auto y = model.forward(normal({3, 2, 8}, seed), normal({5, 2, 6}, seed + 1), normal({5, 2, 6}, seed + 2));
                        y.square().mean().backward();
                        return {y.detach()};
                      });
  });
}

/// A layer over a weight that may be another module's, too.
struct Projection : torch::nn::Module {
  explicit Projection(const at::Tensor& tensor) : weight(register_parameter("weight", tensor)) {}
  at::Tensor forward(const at::Tensor& x) { return F::linear(x, weight); }
  at::Tensor weight;
};

struct Tied : torch::nn::Module {
  Tied()
      : embedding(register_module("embedding", torch::nn::Embedding(12, 10))),
        middle(register_module("middle", torch::nn::Linear(10, 10))),
        head(register_module("head", std::make_shared<Projection>(embedding->weight))) {}
  at::Tensor forward(const at::Tensor& tokens) { return head->forward(at::tanh(middle(embedding(tokens)))); }
  torch::nn::Embedding embedding;
  torch::nn::Linear middle;
  std::shared_ptr<Projection> head;
};

// One tensor under two names is one parameter, under the first name.
TEST(Trap, WeightsTiedAcrossUnits) {
  over_ranks([](int rank) {
    const auto mesh = line();
    const auto tokens = [](int r) { return torch::arange(5, at::kLong).add(2 * r).remainder(12); };
    for (const auto& strategy : testing::all_strategies()) {
      const auto plain = testing::seeded([] { return std::make_shared<Tied>(); });
      const auto model = testing::seeded([] { return std::make_shared<Tied>(); });
      auto sharded = fully_shard(*model, {.mesh = mesh,
                                          .units = each<torch::nn::EmbeddingImpl, torch::nn::LinearImpl, Projection>(),
                                          .placements = Placements::from_name(strategy)});
      EXPECT_TRUE(model->embedding->weight.is_same(model->head->weight));
      EXPECT_EQ(sharded.engine()->units().front()->parameters.front().name, "embedding.weight");  // In the root.
      SGD optimizer(*model, {.lr = 0.1});
      for (int step = 0; step < 3; ++step) {
        plain->zero_grad();
        for (int r = 0; r < mesh.size(); ++r) plain->forward(tokens(r)).square().mean().backward();
        optimizer.zero_grad();
        model->forward(tokens(rank)).square().mean().backward();
        const torch::NoGradGuard no_grad;
        testing::NamedTensors expected;
        for (auto& item : plain->named_parameters()) {
          if (item.key() == "head.weight") continue;
          auto gradient = item.value().grad() / mesh.size();
          item.value().sub_(0.1 * gradient);
          expected.emplace_back(item.key(), gradient);
        }
        expect_same(sharded.full_gradients(), expected, 1e-5, strategy);
        optimizer.step();
      }
    }
  });
}

struct TiedInside : torch::nn::Module {
  TiedInside() : left(register_parameter("left", normal({6, 6}, 1))), right(register_parameter("right", left)) {
    child = register_module("child", torch::nn::Linear(6, 2));
  }
  at::Tensor forward(const at::Tensor& x) { return child(at::tanh(x.matmul(left)).matmul(right.t())); }
  at::Tensor left, right;
  torch::nn::Linear child{nullptr};
};

TEST(Trap, WeightsTiedWithinAModule) {
  over_ranks([](int rank) {
    const auto mesh = line();
    const auto plain = testing::seeded([] { return std::make_shared<TiedInside>(); });
    const auto model = testing::seeded([] { return std::make_shared<TiedInside>(); });
    auto sharded = fully_shard(*model, {.mesh = mesh, .units = each_linear()});
    for (int r = 0; r < mesh.size(); ++r) plain->forward(batch(r)).square().mean().backward();
    model->forward(batch(rank)).square().mean().backward();
    testing::NamedTensors expected;
    for (const auto& [name, gradient] : testing::gradients_of(*plain)) {
      if (name != "right") expected.emplace_back(name, gradient / mesh.size());
    }
    expect_same(sharded.full_gradients(), expected, 1e-5, "gradients");
    {
      const torch::NoGradGuard no_grad;
      model->right.mul_(2);
    }
    EXPECT_TRUE(torch::equal(model->left, plain->left * 2));
  });
}

// The profiler records addresses, also of parameters that have none.
TEST(Trap, ProfilerThatRecordsInputs) {
  over_ranks([](int rank) {
    const auto plain = make_net();
    const auto model = make_net();
    const auto sharded = fully_shard(*model, {.mesh = line(), .units = each_linear()});
    namespace profiler = torch::autograd::profiler;
    const profiler::ProfilerConfig config(torch::profiler::impl::ProfilerState::KINETO, /*report_input_shapes=*/true,
                                          /*profile_memory=*/true);
    const std::set<torch::profiler::impl::ActivityType> activities = {torch::profiler::impl::ActivityType::CPU};
    profiler::prepareProfiler(config, activities);
    profiler::enableProfiler(config, activities);
    for (int pass = 0; pass < 2; ++pass) model->forward(batch(rank)).sum().backward();
    const auto result = profiler::disableProfiler();
    std::map<std::string, int> calls;
    for (const auto& event : result->events()) ++calls[event.name()];
    // The units were freed before there was a profiler: it misses their first uses.
    EXPECT_GE(calls["aten::addmm"], 3);
    EXPECT_GE(calls["aten::mm"], 5);
    EXPECT_TRUE(torch::equal(model->forward(batch(rank)), plain->forward(batch(rank))));
  });
}

TEST(Trap, AutocastCastsWhatItGathered) {
  over_ranks([] {
    expect_like_plain(new_net, each_linear(), [](Net& net, int rank) -> Results {
      at::autocast::set_autocast_enabled(at::kCPU, true);
      const auto y = net.forward(batch(rank));
      at::autocast::clear_cache();
      at::autocast::set_autocast_enabled(at::kCPU, false);
      EXPECT_EQ(y.scalar_type(), at::kBFloat16);
      y.to(at::kFloat).square().mean().backward();
      return {y.detach()};
    });
  });
}

// Other passes between training steps change the order of touches, nothing else.
TEST(Trap, EvaluationBetweenSteps) {
  over_ranks([](int rank) {
    const auto mesh = line();
    for (const auto& strategy : testing::all_strategies()) {
      const auto quiet = make_net();
      const auto model = make_net();
      auto reference = fully_shard(*quiet, {.mesh = mesh, .units = each_linear(), .placements = Placements::from_name(strategy)});
      auto sharded = fully_shard(*model, {.mesh = mesh, .units = each_linear(), .placements = Placements::from_name(strategy)});
      SGD quiet_optimizer(*quiet, {.lr = 0.1});
      SGD optimizer(*model, {.lr = 0.1});
      for (int step = 0; step < 4; ++step) {
        quiet_optimizer.zero_grad();
        optimizer.zero_grad();
        const auto expected = quiet->forward(batch(rank));
        expected.square().mean().backward();
        {
          const torch::NoGradGuard no_grad;
          EXPECT_TRUE(torch::equal(model->forward(batch(rank)), expected)) << strategy;
          model->third(model->second(at::ones({1, 10})));
        }
        {
          const torch::InferenceMode inference;
          const auto y = model->forward(batch(rank));
          EXPECT_TRUE(y.is_inference());
          EXPECT_TRUE(torch::equal(y, expected)) << strategy;
        }
        auto loss = model->forward(batch(rank)).square().mean();
        {
          const torch::NoGradGuard no_grad;
          model->first(batch(rank));  // Between forward and backward.
        }
        loss.backward();
        quiet_optimizer.step();
        optimizer.step();
        expect_same(sharded.full_parameters(), reference.full_parameters(), 0, strategy);
      }
    }
  });
}

TEST(Trap, WritesInInferenceModeAreWrittenBack) {
  over_ranks([] {
    const auto model = make_net();
    auto sharded = fully_shard(*model, {.mesh = line(), .units = each_linear()});
    {
      const torch::InferenceMode inference;
      model->first->bias.fill_(3);
      model->second(at::ones({1, 10}));
    }
    EXPECT_TRUE(torch::equal(model->first->bias, at::full({10}, 3.0F)));
    EXPECT_TRUE(torch::equal(sharded.full_parameters()[1].second, at::full({10}, 3.0F)));
  });
}

TEST(Trap, TwoModelsSideBySide) {
  over_ranks([](int rank) {
    const auto mesh = line();
    const auto loss_of = [](Net& a, Net& b, int r) {
      return (a.forward(batch(r)) * b.forward(batch(r + 1))).square().mean() +
             (a.first->weight - 2 * b.second->weight.narrow(1, 0, 6)).square().sum();
    };
    const auto plain_a = make_net();
    const auto plain_b = make_net();
    for (int r = 0; r < mesh.size(); ++r) loss_of(*plain_a, *plain_b, r).backward();
    for (const auto& strategy : testing::all_strategies()) {
      const auto a = make_net();
      const auto b = make_net();
      auto sharded_a = fully_shard(*a, {.mesh = mesh, .units = each_linear()});
      auto sharded_b = fully_shard(*b, {.mesh = mesh, .units = each_linear(), .placements = Placements::from_name(strategy)});
      for (int pass = 0; pass < 2; ++pass) {
        sharded_a.zero_grad();
        sharded_b.zero_grad();
        loss_of(*a, *b, rank).backward();
        for (const auto& [sharded, plain] : {std::pair(&sharded_a, plain_a), std::pair(&sharded_b, plain_b)}) {
          auto expected = testing::gradients_of(*plain);
          for (auto& [name, gradient] : expected) gradient = gradient / mesh.size();
          expect_same(sharded->full_gradients(), expected, mesh.size() == 1 ? 0 : 1e-5, strategy);
        }
      }
    }
  });
}

// The average of weights over steps: one operator that reads one model and writes another.
TEST(Trap, OneOperatorOnTwoModels) {
  over_ranks([](int rank) {
    const auto mesh = line();
    const torch::NoGradGuard no_grad;
    const auto average = [](Net& mean, Net& net, bool foreach) {
      if (foreach) {
        torch::_foreach_lerp_(mean.parameters(), net.parameters(), 0.25);
        return;
      }
      auto targets = mean.parameters();
      const auto sources = net.parameters();
      for (std::size_t i = 0; i < targets.size(); ++i) targets[i].lerp_(sources[i], 0.25);
    };
    for (const bool foreach : {false, true}) {
      for (const auto& strategy : testing::all_strategies()) {
        const auto plain_mean = make_net();
        torch::manual_seed(2);
        const auto plain = std::make_shared<Net>();
        const auto mean = make_net();
        torch::manual_seed(2);
        const auto net = std::make_shared<Net>();
        auto sharded_mean = fully_shard(*mean, {.mesh = mesh, .units = each_linear(), .placements = Placements::from_name(strategy)});
        auto sharded = fully_shard(*net, {.mesh = mesh, .units = each_linear()});
        for (int step = 0; step < 2; ++step) {
          average(*plain_mean, *plain, foreach);
          average(*mean, *net, foreach);
          EXPECT_TRUE(torch::equal(net->forward(batch(rank)), plain->forward(batch(rank)))) << strategy;
          EXPECT_TRUE(torch::equal(mean->forward(batch(rank)), plain_mean->forward(batch(rank)))) << strategy;
        }
        expect_same(sharded_mean.full_parameters(), testing::values_of(*plain_mean), 0, strategy);
        expect_same(sharded.full_parameters(), testing::values_of(*plain), 0, strategy);
      }
    }
  });
}

TEST(Trap, AnotherThreadAfterThisOne) {
  over_ranks([](int rank) {
    const auto plain = make_net();
    const auto model = make_net();
    auto sharded = fully_shard(*model, {.mesh = line(), .units = each_linear()});
    at::Tensor output;
    std::thread([&] { output = model->forward(batch(rank)); }).join();
    EXPECT_TRUE(torch::equal(output, plain->forward(batch(rank))));
    std::thread([&] { output.sum().backward(); }).join();
    const auto first = sharded.full_gradients();
    sharded.zero_grad();
    model->forward(batch(rank)).sum().backward();
    expect_same(sharded.full_gradients(), first, 0, "in this thread");
  });
}

TEST(Trap, ModelsOfTheirOwnInThreads) {
  testing::run_ranks(1, [] {
    const auto plain = make_net();
    std::vector<std::thread> threads;
    std::vector<at::Tensor> outputs(2);
    for (int k = 0; k < 2; ++k) {
      threads.emplace_back([k, &outputs] {
        const torch::NoGradGuard no_grad;
        const auto model = std::make_shared<Net>();
        for (const auto& parameter : model->parameters()) torch::nn::init::constant_(parameter, 0.1 * (k + 1));
        const auto sharded = fully_shard(*model, {.mesh = line(), .units = each_linear()});
        for (int pass = 0; pass < 20; ++pass) outputs[static_cast<std::size_t>(k)] = model->forward(batch(0));
      });
    }
    for (auto& thread : threads) thread.join();
    const torch::NoGradGuard no_grad;
    for (int k = 0; k < 2; ++k) {
      for (const auto& parameter : plain->parameters()) torch::nn::init::constant_(parameter, 0.1 * (k + 1));
      EXPECT_TRUE(torch::equal(outputs[static_cast<std::size_t>(k)], plain->forward(batch(0))));
    }
  });
}

/// One autocast scope around several updates: its cache must serve no stale weights, and hold none.
TEST(Trap, AutocastCachesNoShardedWeights) {
  over_ranks([] {
    const auto train = [&](Net& net, bool sharded) {
      std::unique_ptr<Optimizer> optimizer;
      std::unique_ptr<torch::optim::SGD> plain;
      if (sharded) {
        optimizer = std::make_unique<SGD>(net, SGDOptions{.lr = 0.1});
      } else {
        plain = std::make_unique<torch::optim::SGD>(net.parameters(), torch::optim::SGDOptions(0.1));
      }
      Results losses;
      at::autocast::increment_nesting();
      at::autocast::set_autocast_enabled(at::kCPU, true);
      for (int step = 0; step < 3; ++step) {
        const auto loss = net.forward(batch(0)).to(at::kFloat).square().mean();
        losses.push_back(loss.detach());
        loss.backward();
        if (sharded) {
          optimizer->step();
          optimizer->zero_grad();
        } else {
          plain->step();
          plain->zero_grad();
          at::autocast::clear_cache();
        }
      }
      at::autocast::set_autocast_enabled(at::kCPU, false);
      if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
      return losses;
    };
    auto plain = make_net();
    const auto expected = train(*plain, false);
    auto net = make_net();
    fully_shard(*net, {.mesh = line(), .units = each_linear()});
    const auto losses = train(*net, true);
    for (std::size_t i = 0; i < losses.size(); ++i) {
      EXPECT_TRUE(at::equal(losses[i], expected[i])) << "step " << i << ": " << losses[i].item<float>() << " " << expected[i].item<float>();
    }
  });
}

}  // namespace trap_test
}  // namespace fsdp
