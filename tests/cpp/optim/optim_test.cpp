// Optimizers on shards against the same algorithm on whole tensors: equal gradients must give equal bits, however the model is cut.

#include "fsdp/optim.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "fsdp/fsdp.h"
#include "support/rules.h"
#include "support/twins.h"

namespace fsdp {
namespace optim_test {

using testing::batch;
using testing::each_linear;
using testing::expect_rule;
using testing::expect_same;
using testing::fused_adamw;
using testing::has;
using testing::line;
using testing::Loss;
using testing::make_net;
using testing::mean_square;
using testing::message_of;
using testing::Net;
using testing::over_ranks;
using testing::Rule;
using testing::values_of;

Rule fused_adamw(AdamWOptions options) {
  return fused_adamw([options](const std::string&) { return options; });
}

Rule fused_sgd(SGDOptions options) {
  auto buffers = std::make_shared<std::map<std::string, at::Tensor>>();
  return [options, buffers](const std::string& name, at::Tensor& value, const at::Tensor& gradient) {
    std::vector<at::Tensor> momentum;
    bool first = false;
    if (options.momentum != 0) {
      first = buffers->try_emplace(name, at::zeros_like(value)).second;
      momentum = {buffers->at(name)};
    }
    at::_fused_sgd_({value}, {gradient}, momentum, options.weight_decay, options.momentum, options.lr, options.dampening, options.nesterov,
                    false, first);
  };
}

TEST(AdamW, SameBitsAsTheFusedKernelOnWholeParameters) {
  over_ranks([] {
    for (const auto& options : {AdamWOptions{.lr = 1e-2}, AdamWOptions{.lr = 0.1, .betas = {0.5, 0.9}, .eps = 1e-4, .weight_decay = 0.3},
                                AdamWOptions{.lr = 1e-2, .weight_decay = 0}}) {
      expect_rule([&](torch::nn::Module& module) { return AdamW(module, options); }, [&] { return fused_adamw(options); });
    }
  });
}

TEST(SGD, SameBitsAsTheFusedKernelOnWholeParameters) {
  over_ranks([] {
    for (const auto& options : {SGDOptions{.lr = 0.1}, SGDOptions{.lr = 0.1, .weight_decay = 0.2}, SGDOptions{.lr = 0.1, .momentum = 0.9},
                                SGDOptions{.lr = 0.1, .momentum = 0.9, .dampening = 0.3, .weight_decay = 0.1},
                                SGDOptions{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.1, .nesterov = true}}) {
      expect_rule([&](torch::nn::Module& module) { return SGD(module, options); }, [&] { return fused_sgd(options); });
    }
  });
}

/// Trains the sharded model and a whole one with one of torch's own optimizers, on the same gradients.
void expect_torch(const std::function<Optimizer(torch::nn::Module&)>& make_optimizer, const TorchOptimizerFactory& make_torch,
                  double tolerance, const std::vector<double>& factors = {1, 1, 1, 1}, const Loss& loss = mean_square) {
  const auto mesh = line();
  for (const auto& strategy : testing::all_strategies()) {
    const auto model = make_net();
    const auto plain = make_net();
    auto sharded = fully_shard(*model, {.mesh = mesh, .units = each_linear(), .placements = Placements::from_name(strategy)});
    auto optimizer = make_optimizer(*model);
    const auto torch_optimizer = make_torch(plain->parameters());
    const double lr = torch_optimizer->param_groups()[0].options().get_lr();
    for (std::size_t step = 0; step < factors.size(); ++step) {
      optimizer.zero_grad();
      loss(*model, static_cast<int>(step), static_cast<int>(mesh.rank())).backward();
      const auto gradients = sharded.full_gradients();
      auto parameters = plain->parameters();
      for (std::size_t i = 0; i < parameters.size(); ++i) parameters[i].mutable_grad() = gradients[i].second;
      optimizer.set_lr_factor(factors[step]);
      torch_optimizer->param_groups()[0].options().set_lr(lr * factors[step]);
      EXPECT_EQ(optimizer.lr(), lr * factors[step]);
      optimizer.step();
      torch_optimizer->step();
      expect_same(sharded.full_parameters(), values_of(*plain), tolerance, strategy + ", step " + std::to_string(step));
    }
  }
}

TEST(AdamW, IsTorchsToRounding) {
  testing::run_ranks(2, [] {
    expect_torch([](torch::nn::Module& module) { return AdamW(module, {.lr = 0.05, .weight_decay = 0.1}); },
                 [](auto parameters) {
                   return std::make_unique<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(0.05).weight_decay(0.1));
                 },
                 1e-5, {1, 0.5, 0.25, 1});
  });
}

TEST(SGD, IsTorchsToRounding) {
  testing::run_ranks(2, [] {
    for (const auto& options : {SGDOptions{.lr = 0.1, .weight_decay = 0.2}, SGDOptions{.lr = 0.1, .momentum = 0.9, .dampening = 0.3},
                                SGDOptions{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.1, .nesterov = true}}) {
      expect_torch([&](torch::nn::Module& module) { return SGD(module, options); },
                   [&](auto parameters) {
                     return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(options.lr)
                                                                                .momentum(options.momentum)
                                                                                .dampening(options.dampening)
                                                                                .weight_decay(options.weight_decay)
                                                                                .nesterov(options.nesterov));
                   },
                   1e-6, {1, 0.5, 0.25, 1});
    }
  });
}

TEST(Wrap, SameBitsAsTorchsOptimizerOnWholeParameters) {
  const std::map<std::string, TorchOptimizerFactory> factories = {
      {"Adagrad", [](auto p) { return std::make_unique<torch::optim::Adagrad>(p, torch::optim::AdagradOptions(0.1).lr_decay(0.1)); }},
      {"RMSprop", [](auto p) { return std::make_unique<torch::optim::RMSprop>(p, torch::optim::RMSpropOptions(0.01).momentum(0.5)); }},
      {"Adam", [](auto p) { return std::make_unique<torch::optim::Adam>(p, torch::optim::AdamOptions(0.01).amsgrad(true)); }},
      {"SGD", [](auto p) { return std::make_unique<torch::optim::SGD>(p, torch::optim::SGDOptions(0.1).momentum(0.9)); }},
  };
  over_ranks([&] {
    for (const auto& [name, factory] : factories) {
      SCOPED_TRACE(name);
      expect_torch([factory = factory](torch::nn::Module& module) -> Optimizer { return wrap(module, factory); }, factory, 0,
                   {1, 1, 0.5, 0.1});
    }
  });
}

/// Remembers how many parameters had gradients at its last step.
struct CountingSGD : torch::optim::SGD {
  using SGD::SGD;
  at::Tensor step(LossClosure closure = nullptr) override {
    gradients = 0;
    for (const auto& parameter : param_groups()[0].params()) gradients += parameter.grad().defined() ? 1 : 0;
    return SGD::step(closure);
  }
  int gradients = 0;
};

TEST(Wrap, GivesTheOptimizerOnePieceOfEachParameter) {
  over_ranks([](int rank) {
    const auto mesh = line();
    const auto model = make_net();
    model->first->bias.set_requires_grad(false);
    (void)fully_shard(*model, {.mesh = mesh, .units = each_linear()});
    std::vector<at::Tensor> pieces;
    auto optimizer = wrap(*model, [&](std::vector<at::Tensor> parameters) {
      pieces = parameters;
      return std::make_unique<CountingSGD>(parameters, 0.1);
    });
    ASSERT_EQ(pieces.size(), 5U);
    double numel = 0;
    for (const auto& piece : pieces) {
      EXPECT_EQ(piece.dim(), 1);
      EXPECT_TRUE(piece.requires_grad() && piece.is_leaf());
      numel += static_cast<double>(piece.numel());
    }
    EXPECT_EQ(mesh.sum(numel), 60 + 100 + 10 + 30 + 3);

    const auto& inner = static_cast<CountingSGD&>(optimizer.torch_optimizer());
    model->forward(batch(rank)).square().mean().backward();
    optimizer.step();
    EXPECT_EQ(inner.gradients, 5);
    optimizer.zero_grad();
    model->second->weight.sum().backward();
    optimizer.step();
    EXPECT_EQ(inner.gradients, 1);
    EXPECT_TRUE(has(message_of([&] { wrap(*model, [](auto) { return nullptr; }); }), "returned no optimizer"));
  });
}

TEST(ParamGroups, TheFirstThatMatchesWins) {
  const auto ends = [](std::string suffix) {
    return [suffix](const std::string& name) {
      return name.size() >= suffix.size() && name.compare(name.size() - suffix.size(), suffix.size(), suffix) == 0;
    };
  };
  const std::vector<ParamGroup> groups = {
      {.matches = ends("bias"), .lr = {}, .weight_decay = 0.0},
      {.matches = [](const std::string& name) { return name.rfind("third.", 0) == 0; }, .lr = 0.3, .weight_decay = {}},
      {.matches = [](const std::string& name) { return name == "third.weight"; }, .lr = 9.0, .weight_decay = {}},
  };
  const auto options_of = [&](const std::string& name) {
    AdamWOptions options{.lr = 0.02, .weight_decay = 0.1};
    if (ends("bias")(name)) {
      options.weight_decay = 0;
    } else if (name == "third.weight") {
      options.lr = 0.3;
    }
    return options;
  };
  over_ranks([&] {
    expect_rule([&](torch::nn::Module& module) { return AdamW(module, {.lr = 0.02, .weight_decay = 0.1}, groups); },
                [&] { return fused_adamw(options_of); });
  });
}

TEST(LearningRate, FactorScalesEveryGroup) {
  const auto schedule = cosine_schedule(2, 6, 0.1);
  over_ranks([&] {
    const std::vector<ParamGroup> groups = {
        {.matches = [](const std::string& name) { return name == "first.weight"; }, .lr = 0.5, .weight_decay = {}}};
    auto step_now = std::make_shared<int>(0);
    expect_rule([&](torch::nn::Module& module) { return AdamW(module, {.lr = 0.02}, groups); },
                [&] {
                  return fused_adamw([&, step_now](const std::string& name) {
                    return AdamWOptions{.lr = (name == "first.weight" ? 0.5 : 0.02) * schedule(*step_now)};
                  });
                },
                {.before_step = [&, step_now](Optimizer& optimizer, int step) {
                  *step_now = step;
                  optimizer.set_lr_factor(schedule(step));
                  EXPECT_EQ(optimizer.lr(), 0.02 * schedule(step));
                }});
  });
}

// As torch's: a parameter without a gradient is left alone, its weight is not decayed, and its step count stands still.
at::Tensor some_unused(Net& net, int step, int rank) {
  at::Tensor x = batch(rank + step).matmul(net.first->weight.t());
  if (step >= 1 && step != 3) x = x + net.first->bias;  // One of a unit.
  if (step >= 2) x = net.second(at::tanh(x));           // A whole unit.
  return net.third(x).square().mean();
}

TEST(Optimizers, ParametersThatGetGradientsLater) {
  over_ranks([] {
    const AdamWOptions adamw{.lr = 0.05, .weight_decay = 0.1};
    expect_rule([&](torch::nn::Module& module) { return AdamW(module, adamw); }, [&] { return fused_adamw(adamw); }, {.loss = some_unused});
    const SGDOptions sgd{.lr = 0.1, .momentum = 0.9, .dampening = 0.5, .weight_decay = 0.1};
    expect_rule([&](torch::nn::Module& module) { return SGD(module, sgd); }, [&] { return fused_sgd(sgd); }, {.loss = some_unused});
    expect_torch(
        [](torch::nn::Module& module) -> Optimizer {
          return wrap(module, [](auto p) { return std::make_unique<torch::optim::Adam>(p, 0.01); });
        },
        [](auto p) { return std::make_unique<torch::optim::Adam>(p, 0.01); }, 0, {1, 1, 1, 1, 1}, some_unused);
  });
}

/// Parameters that fill whole vector registers, so that the optimizer may take several as one segment.
struct Even : torch::nn::Module {
  Even() {
    for (const std::int64_t numel : {32, 16, 48}) {
      register_parameter("p" + std::to_string(numel), testing::normal({numel}, static_cast<std::uint64_t>(numel)));
    }
  }
};

// Parameters that were skipped once have another step count than their neighbours, and are no longer of their segment.
TEST(Optimizers, NeighboursOfDifferentAge) {
  over_ranks([] {
    const auto mesh = line();
    const AdamWOptions adamw{.lr = 0.05, .weight_decay = 0.1};
    const SGDOptions sgd{.lr = 0.1, .momentum = 0.9, .dampening = 0.5};
    for (const bool adam : {true, false}) {
      for (const auto& strategy : testing::all_strategies()) {
        Even model;
        auto whole = values_of(Even());
        auto sharded = fully_shard(model, {.mesh = mesh, .placements = Placements::from_name(strategy)});
        Optimizer optimizer = adam ? static_cast<Optimizer>(AdamW(model, adamw)) : static_cast<Optimizer>(SGD(model, sgd));
        const auto rule = adam ? fused_adamw(adamw) : fused_sgd(sgd);
        for (int step = 0; step < 5; ++step) {
          optimizer.zero_grad();
          at::Tensor loss = at::zeros({});
          for (const auto& item : model.named_parameters()) {
            if (item.key() != "p16" || (step != 0 && step != 2)) loss = loss + item.value().pow(3).sum() * (step + 1);
          }
          loss.backward();
          const auto gradients = sharded.full_gradients();
          optimizer.step();
          for (std::size_t i = 0; i < whole.size(); ++i) {
            if (gradients[i].second.defined()) rule(whole[i].first, whole[i].second, gradients[i].second);
          }
          expect_same(sharded.full_parameters(), whole, 0, strategy + ", step " + std::to_string(step));
        }
      }
    }
  });
}

// [Same tails] also where parameters follow each other without padding.
TEST(Optimizers, SameBitsOfRowsOnOneRank) {
  testing::run_ranks(1, [] {
    const AdamWOptions options{.lr = 0.05, .weight_decay = 0.1};
    const auto model = make_net();
    auto whole = values_of(*make_net());
    auto sharded = fully_shard(*model, {.granularity = [](const std::string&, const at::Tensor&) { return Granularity::rows(); }});
    AdamW optimizer(*model, options);
    const auto rule = fused_adamw(options);
    for (int step = 0; step < 5; ++step) {
      optimizer.zero_grad();
      mean_square(*model, step, 0).backward();
      const auto gradients = sharded.full_gradients();
      optimizer.step();
      for (std::size_t i = 0; i < whole.size(); ++i) rule(whole[i].first, whole[i].second, gradients[i].second);
      expect_same(sharded.full_parameters(), whole, 0, "step " + std::to_string(step));
    }
  });
}

/// Parameters of several dtypes in one unit.
struct Mixed : torch::nn::Module {
  Mixed()
      : single(register_parameter("single", testing::normal({37}, 1))),
        twice(register_parameter("twice", testing::normal({29}, 2).to(at::kDouble))),
        half(register_parameter("half", testing::normal({41}, 3).to(at::kBFloat16))),
        frozen(register_parameter("frozen", testing::normal({11}, 4), /*requires_grad=*/false)) {}
  at::Tensor loss() const {
    return single.square().sum() + twice.square().sum() + half.to(at::kFloat).pow(3).sum() + (single.narrow(0, 0, 11) * frozen).sum();
  }
  at::Tensor single, twice, half, frozen;
};

TEST(Optimizers, DtypesAndFrozenParametersInOneUnit) {
  over_ranks([] {
    const auto mesh = line();
    const AdamWOptions options{.lr = 0.05, .weight_decay = 0.1};
    for (const auto& strategy : testing::all_strategies()) {
      const auto model = std::make_shared<Mixed>();
      auto whole = values_of(Mixed());
      auto sharded = fully_shard(*model, {.mesh = mesh, .placements = Placements::from_name(strategy)});
      AdamW optimizer(*model, options);
      const auto rule = fused_adamw(options);
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        model->loss().backward();
        const auto gradients = sharded.full_gradients();
        optimizer.step();
        for (std::size_t i = 0; i < whole.size(); ++i) {
          ASSERT_EQ(gradients[i].second.defined(), i != 3);
          if (i != 3) rule(whole[i].first, whole[i].second, gradients[i].second);
        }
        expect_same(sharded.full_parameters(), whole, 0, strategy);
      }
    }
  });
}

TEST(Optimizers, StepWithoutGradientsChangesNothing) {
  over_ranks([] {
    const auto model = make_net();
    auto sharded = fully_shard(*model, {.mesh = line(), .units = each_linear()});
    const auto before = sharded.full_parameters();
    AdamW adamw(*model, {.lr = 1, .weight_decay = 1});
    SGD sgd(*model, {.lr = 1, .momentum = 0.9, .weight_decay = 1});
    adamw.step();
    sgd.step();
    expect_same(sharded.full_parameters(), before, 0, "parameters");
    EXPECT_EQ(sharded.memory_stats().optimizer_state.live, 0);
  });
}

TEST(Optimizers, AreMovable) {
  testing::run_ranks(2, [](int rank) {
    const auto model = make_net();
    auto sharded = fully_shard(*model, {.mesh = line(), .units = each_linear()});
    std::vector<Optimizer> optimizers;
    optimizers.push_back(AdamW(*model, {.lr = 0.1}));
    optimizers.push_back(SGD(*model, {.lr = 0.1}));
    const auto before = sharded.full_parameters();
    model->forward(batch(rank)).square().mean().backward();
    for (auto& optimizer : optimizers) optimizer.step();
    EXPECT_FALSE(torch::equal(sharded.full_parameters()[0].second, before[0].second));
  });
}

TEST(Optimizers, StateBytesAreAsPredicted) {
  over_ranks([](int rank) {
    const auto mesh = line();
    for (const auto& strategy : testing::all_strategies()) {
      const auto bytes_of = [&](const std::function<Optimizer(torch::nn::Module&)>& make, bool use_second) {
        const auto model = make_net();
        model->first->weight.set_requires_grad(false);
        auto sharded = fully_shard(*model, {.mesh = mesh, .units = each_linear(), .placements = Placements::from_name(strategy)});
        std::int64_t state = 0;
        {
          auto optimizer = make(*model);
          EXPECT_EQ(sharded.memory_stats().optimizer_state.live, 0);  // Taken when it is first needed.
          for (int step = 0; step < 2; ++step) {
            optimizer.zero_grad();
            auto x = model->first(batch(rank));
            if (use_second) x = model->second(x);
            model->third(x).sum().backward();
            optimizer.step();
          }
          state = sharded.memory_stats().optimizer_state.live;
          EXPECT_EQ(sharded.memory_stats().optimizer_state.peak, state);
        }
        EXPECT_EQ(sharded.memory_stats().optimizer_state.live, 0);
        // The trainable main parameters, of the units in use.
        std::int64_t trainable = 0;
        for (const auto& unit : sharded.engine()->units()) {
          if (unit->name == "second" && !use_second) continue;
          trainable += strategy == "no_shard" ? unit->layout.trainable_bytes() : unit->layout.trainable_shard_bytes();
        }
        EXPECT_GE(trainable, 4 * (10 + 30 + 3) / mesh.size());
        return std::pair(state, trainable);
      };
      for (const bool use_second : {true, false}) {
        const auto [adamw, trainable] = bytes_of([](auto& module) { return AdamW(module); }, use_second);
        EXPECT_EQ(adamw, 2 * trainable) << strategy;
        EXPECT_EQ(bytes_of([](auto& module) { return SGD(module, {.momentum = 0.9}); }, use_second).first, trainable) << strategy;
        EXPECT_EQ(bytes_of([](auto& module) { return SGD(module, {}); }, use_second).first, 0) << strategy;
      }
    }
  });
}

TEST(Optimizers, RefuseBadArguments) {
  testing::run_ranks(1, [] {
    const auto model = make_net();
    (void)fully_shard(*model, {});
    const double nan = std::numeric_limits<double>::quiet_NaN();
    const auto adamw = [&](AdamWOptions options, std::vector<ParamGroup> groups = {}) {
      return message_of([&] { AdamW optimizer(*model, options, groups); });
    };
    const auto sgd = [&](SGDOptions options) { return message_of([&] { SGD optimizer(*model, options); }); };
    for (const double lr : {-0.1, nan}) {
      EXPECT_TRUE(has(adamw({.lr = lr}), "learning rate " + std::to_string(lr))) << adamw({.lr = lr});
      EXPECT_TRUE(has(sgd({.lr = lr}), "learning rate " + std::to_string(lr))) << sgd({.lr = lr});
    }
    EXPECT_TRUE(has(adamw({.weight_decay = -1}), "weight decay -1")) << adamw({.weight_decay = -1});
    EXPECT_TRUE(has(adamw({.weight_decay = nan}), "weight decay nan"));
    EXPECT_TRUE(has(adamw({.betas = {1, 0.9}}), "betas must lie in [0, 1)"));
    EXPECT_TRUE(has(adamw({.betas = {0.9, -0.1}}), "betas must lie in [0, 1)"));
    EXPECT_TRUE(has(adamw({.eps = -1}), "eps must be at least 0"));
    EXPECT_TRUE(has(adamw({}, {ParamGroup{}}), "without `matches`"));
    const auto all = [](const std::string&) { return true; };
    EXPECT_TRUE(has(adamw({}, {{.matches = all, .lr = -2.0, .weight_decay = {}}}), "learning rate -2"));
    const auto none = adamw({}, {{.matches = all}, {.matches = [](const std::string&) { return false; }}});
    EXPECT_TRUE(has(none, "ParamGroup 1 matches no parameter of the model, whose names are such as '")) << none;
    EXPECT_TRUE(has(adamw({}, {{.matches = all, .lr = {}, .weight_decay = -2.0}}), "weight decay -2"));
    EXPECT_TRUE(has(sgd({.momentum = -0.5}), "momentum must be at least 0"));
    EXPECT_TRUE(has(sgd({.nesterov = true}), "nesterov needs momentum"));
    EXPECT_TRUE(has(sgd({.momentum = 0.9, .dampening = 0.1, .nesterov = true}), "no dampening"));
    EXPECT_EQ(adamw({.lr = 0, .betas = {0, 0}, .eps = 0, .weight_decay = 0}), "no error");
    EXPECT_EQ(sgd({.lr = 0}), "no error");
  });
}

}  // namespace optim_test
}  // namespace fsdp
