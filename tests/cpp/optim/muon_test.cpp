// Muon on matrices that one rank owns, against the algorithm written out on whole tensors.

#include "fsdp/muon.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
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
namespace muon_test {

using testing::batch;
using testing::each_linear;
using testing::expect_rule;
using testing::expect_same;
using testing::has;
using testing::line;
using testing::make_net;
using testing::message_of;
using testing::NamedTensors;
using testing::normal;
using testing::over_ranks;
using testing::Rule;

/// X <- a X + b (X X') X + c (X X')^2 X, from X = M / |M|; as in Jordan's description, whichever side is longer.
at::Tensor newton_schulz(const at::Tensor& matrix) {
  auto x = matrix.to(at::kDouble);
  const bool tall = x.size(0) > x.size(1);
  if (tall) x = x.transpose(0, 1);
  x = x / (x.norm() + 1e-7);
  for (int k = 0; k < 5; ++k) {
    const auto gram = at::mm(x, x.transpose(0, 1));
    x = 3.4445 * x + at::mm(-4.7750 * gram + 2.0315 * at::mm(gram, gram), x);
  }
  return tall ? x.transpose(0, 1) : x;
}

/// The same by the operators, and in the order, of torch.optim.Muon: directions that a gradient hardly has are made as long as the others,
/// so that in bf16 any other way to round gives visibly other numbers.
at::Tensor newton_schulz_of_torch(const at::Tensor& matrix) {
  auto x = matrix.to(at::kBFloat16);
  if (matrix.size(0) > matrix.size(1)) x = x.t();
  x = x.div(x.norm().clamp(1e-7));
  for (int k = 0; k < 5; ++k) {
    const auto gram = at::matmul(x, x.t());
    const auto gram_update = at::addmm(gram, gram, gram, -4.7750, 2.0315);
    x = at::addmm(x, gram_update, x, 3.4445);
  }
  return matrix.size(0) > matrix.size(1) ? x.t() : x;
}

bool is_matrix(const at::Tensor& value) { return value.dim() >= 2; }

/// What five iterations in fp32, each of which may triple an error, leave of an update of the sizes here.
constexpr double kRounding = 1e-4;

/// Muon for matrices, ATen's AdamW kernel for the rest.
Rule muon_rule(const MuonOptions& options) {
  struct State {
    at::Tensor momentum, first, second, step;
  };
  auto states = std::make_shared<std::map<std::string, State>>();
  return [options, states](const std::string& name, at::Tensor& value, const at::Tensor& gradient) {
    const auto [found, is_new] = states->try_emplace(name);
    auto& state = found->second;
    if (is_new) state = {at::zeros_like(value), at::zeros_like(value), at::zeros_like(value), at::zeros({}, at::kFloat)};
    if (!is_matrix(value)) {
      state.step += 1;
      const auto& adamw = options.adamw;
      at::_fused_adamw_({value}, {gradient}, {state.first}, {state.second}, {}, {state.step}, adamw.lr, std::get<0>(adamw.betas),
                        std::get<1>(adamw.betas), adamw.weight_decay, adamw.eps, false, false);
      return;
    }
    state.momentum = state.momentum.lerp(gradient, 1 - options.momentum);
    const auto direction = options.nesterov ? gradient.lerp(state.momentum, options.momentum) : state.momentum;
    const auto flat = direction.reshape({direction.size(0), -1});
    const auto rows = static_cast<double>(flat.size(0));
    const auto columns = static_cast<double>(flat.size(1));
    const double scale =
        options.adjust_lr == AdjustLR::kOriginal ? std::pow(std::max(1.0, rows / columns), 0.5) : 0.2 * std::sqrt(std::max(rows, columns));
    const auto orthogonal = options.ns_dtype == at::kBFloat16 ? newton_schulz_of_torch(flat) : newton_schulz(flat);
    const auto update = orthogonal.to(at::kDouble).reshape(value.sizes()) * scale;
    value = ((1 - options.lr * options.weight_decay) * value.to(at::kDouble) - options.lr * update).to(value.scalar_type());
  };
}

const std::vector<MuonOptions>& variants() {
  static const std::vector<MuonOptions> all = {
      {.lr = 0.05},
      {.lr = 0.05, .weight_decay = 0.3, .momentum = 0.5, .nesterov = false, .ns_dtype = at::kFloat, .adamw = {.lr = 0.01}},
      {.lr = 0.05, .weight_decay = 0.1, .adjust_lr = AdjustLR::kMatchRMSAdamW, .ns_dtype = at::kFloat},
  };
  return all;
}

TEST(Muon, IsTheAlgorithmOnWholeMatrices) {
  over_ranks([] {
    for (const auto& options : variants()) {
      expect_rule([&](torch::nn::Module& module) { return Muon(module, options); }, [&] { return muon_rule(options); },
                  {.granularity = whole_matrices(), .tolerance = kRounding});
    }
  });
}

TEST(Muon, IsTorchsInBFloat16) {
  over_ranks([] {
    const MuonOptions options{.lr = 0.02, .weight_decay = 0.1, .ns_dtype = at::kBFloat16};
    expect_rule([&](torch::nn::Module& module) { return Muon(module, options); }, [&] { return muon_rule(options); },
                {.granularity = whole_matrices(), .tolerance = 1e-6});
  });
}

/// Parameters after a few steps whose gradients are the same numbers on every rank, exactly, so that their mean is, too.
NamedTensors trained(const std::string& strategy, const MuonOptions& options) {
  const auto model = make_net();
  auto sharded = fully_shard(
      *model, {.mesh = line(), .units = each_linear(), .placements = Placements::from_name(strategy), .granularity = whole_matrices()});
  Muon optimizer(*model, options);
  for (int step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    at::Tensor loss = at::zeros({});
    std::uint64_t seed = 0;
    for (const auto& item : model->named_parameters()) {
      // Small whole numbers: sums over ranks are exact.
      const auto gradient = (8 * normal(item.value().sizes(), 50 * static_cast<std::uint64_t>(step) + ++seed)).round();
      loss = loss + (item.value() * gradient).sum();
    }
    loss.backward();
    optimizer.step();
  }
  return sharded.full_parameters();
}

TEST(Muon, SameBitsForEveryStrategyAndNumberOfRanks) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const MuonOptions options{.lr = 0.05, .weight_decay = 0.1, .ns_dtype = dtype};
    // One rank alone: a process of its own, whose result comes as a file.
    const std::string file = ::testing::TempDir() + "muon_" + std::to_string(getpid()) + ".pt";
    testing::run_ranks(1, [&] {
      std::vector<at::Tensor> values;
      for (const auto& [name, value] : trained("optim_grads_params", options)) values.push_back(value);
      torch::save(values, file);
    });
    over_ranks([&] {
      std::vector<at::Tensor> expected;
      torch::load(expected, file);
      for (const auto& strategy : testing::all_strategies()) {
        const auto values = trained(strategy, options);
        ASSERT_EQ(values.size(), expected.size());
        for (std::size_t i = 0; i < values.size(); ++i) {
          EXPECT_TRUE(torch::equal(values[i].second, expected[i])) << strategy << ": " << values[i].first;
        }
      }
    });
    std::remove(file.c_str());
  }
}

// Singular values of an update end near 1, whatever they were (Jordan: within about [0.7, 1.2]), unless they were almost none.
TEST(Muon, UpdatesAreNearlyOrthogonal) {
  testing::run_ranks(2, [] {
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      for (const auto& shape : std::vector<std::vector<std::int64_t>>{{8, 40}, {40, 8}, {16, 64}}) {
        torch::nn::Module model;
        const auto weight = model.register_parameter("weight", at::zeros(shape));
        auto sharded = fully_shard(model, {.mesh = line(), .granularity = whole_matrices()});
        Muon optimizer(model, {.lr = 1, .momentum = 0, .ns_dtype = dtype});
        const auto gradient = normal(shape, 3);
        (weight * gradient).sum().backward();
        optimizer.step();
        const double scale = std::sqrt(std::max(1.0, static_cast<double>(shape[0]) / static_cast<double>(shape[1])));
        const auto singular = at::linalg_svdvals(-sharded.full_parameters()[0].second / scale);
        EXPECT_GT(singular.min().item<double>(), 0.6) << shape << dtype;
        EXPECT_LT(singular.max().item<double>(), 1.25) << shape << dtype;
        EXPECT_LT((sharded.full_parameters()[0].second * gradient).sum().item<double>(), 0);  // downhill
      }
    }
  });
}

/// Matrices of more than two dimensions, and what is none.
struct Convolution : torch::nn::Module {
  Convolution()
      : kernel(register_parameter("kernel", normal({6, 3, 2, 2}, 1))),
        table(register_parameter("table", normal({7, 4}, 2))),
        bias(register_parameter("bias", normal({6}, 3))),
        frozen(register_parameter("frozen", normal({4, 4}, 4), /*requires_grad=*/false)) {}
  at::Tensor loss() const { return kernel.pow(3).sum() + table.pow(3).sum() + bias.pow(3).sum() + frozen.sum(); }
  at::Tensor kernel, table, bias, frozen;
};

TEST(Muon, TakesTheMatricesItIsGiven) {
  over_ranks([] {
    const auto is_kernel = [](const std::string& name) { return name == "kernel"; };
    for (const auto& strategy : testing::all_strategies()) {
      for (const bool by_predicate : {false, true}) {
        Convolution model;
        // By what is laid out whole; or everything is, and a predicate chooses.
        auto sharded =
            fully_shard(model, {.mesh = line(),
                                .placements = Placements::from_name(strategy),
                                .granularity = by_predicate ? [](const std::string&, const at::Tensor&) { return Granularity::whole(); }
                                                            : whole_matrices(is_kernel)});
        MuonOptions options{.lr = 0.05, .ns_dtype = at::kFloat, .adamw = {.lr = 0.02}};
        if (by_predicate) options.matrices = is_kernel;
        Muon optimizer(model, options);
        EXPECT_EQ(optimizer.lr(), 0.05);
        const auto muon = muon_rule(options);
        const auto adamw = muon_rule(options);
        auto whole = testing::values_of(Convolution());
        for (int step = 0; step < 3; ++step) {
          optimizer.zero_grad();
          model.loss().backward();
          const auto gradients = sharded.full_gradients();
          optimizer.step();
          muon("kernel", whole[0].second, gradients[0].second);
          auto table = whole[1].second.flatten();
          adamw("table", table, gradients[1].second.flatten());
          whole[1].second = table.view({7, 4});
          adamw("bias", whole[2].second, gradients[2].second);
          expect_same(sharded.full_parameters(), whole, kRounding, strategy);
        }
      }
    }
  });
}

TEST(Muon, GroupsAndLearningRates) {
  over_ranks([] {
    const std::vector<ParamGroup> groups = {
        {.matches = [](const std::string& name) { return name.starts_with("second."); }, .lr = 0.2, .weight_decay = 0.4}};
    const MuonOptions options{.lr = 0.05, .weight_decay = 0.1, .ns_dtype = at::kFloat, .adamw = {.lr = 0.02}};
    expect_rule([&](torch::nn::Module& module) { return Muon(module, options, groups); },
                [&] {
                  MuonOptions seconds = options;
                  seconds.lr = seconds.adamw.lr = 0.2;
                  seconds.weight_decay = seconds.adamw.weight_decay = 0.4;
                  return [rule = muon_rule(options), second = muon_rule(seconds)](const std::string& name, at::Tensor& value,
                                                                                  const at::Tensor& gradient) {
                    (name.starts_with("second.") ? second : rule)(name, value, gradient);
                  };
                },
                {.before_step = [](Optimizer& optimizer, int) { EXPECT_EQ(optimizer.lr(), 0.05); },
                 .granularity = whole_matrices(),
                 .tolerance = kRounding});
  });
}

TEST(Muon, SchedulesScaleBothAlgorithms) {
  testing::run_ranks(2, [](int rank) {
    const MuonOptions options{.lr = 0.05, .ns_dtype = at::kFloat, .adamw = {.lr = 0.02}};
    MuonOptions half = options;
    half.lr /= 2;
    half.adamw.lr /= 2;
    std::vector<NamedTensors> results;
    for (const auto& [use, factor] : {std::pair(half, 1.0), std::pair(options, 0.5)}) {
      const auto model = make_net();
      auto sharded = fully_shard(*model, {.mesh = line(), .units = each_linear(), .granularity = whole_matrices()});
      Muon optimizer(*model, use);
      optimizer.set_lr_factor(factor);
      EXPECT_EQ(optimizer.lr(), 0.025);
      model->forward(batch(rank)).square().mean().backward();
      optimizer.step();
      results.push_back(sharded.full_parameters());
    }
    expect_same(results[0], results[1], 0, "half the rate");
  });
}

// As torch's: no gradient, no update and no decay.
TEST(Muon, ParametersThatGetGradientsLater) {
  over_ranks([] {
    const MuonOptions options{.lr = 0.05, .weight_decay = 0.2, .ns_dtype = at::kFloat};
    expect_rule([&](torch::nn::Module& module) { return Muon(module, options); }, [&] { return muon_rule(options); },
                {.loss =
                     [](testing::Net& net, int step, int rank) {
                       at::Tensor x = batch(rank + step).matmul(net.first->weight.t());
                       if (step >= 1) x = x + net.first->bias;
                       if (step >= 2 && step != 3) x = net.second(x);
                       return net.third(x).square().mean();
                     },
                 .granularity = whole_matrices(),
                 .tolerance = kRounding});
  });
}

TEST(Muon, StateBytesAreAsPredicted) {
  over_ranks([](int rank) {
    const auto mesh = line();
    for (const auto& strategy : testing::all_strategies()) {
      const auto model = make_net();
      auto sharded = fully_shard(
          *model, {.mesh = mesh, .units = each_linear(), .placements = Placements::from_name(strategy), .granularity = whole_matrices()});
      double matrices = 0;
      {
        Muon optimizer(*model);
        EXPECT_EQ(sharded.memory_stats().optimizer_state.live, 0);
        for (int step = 0; step < 2; ++step) {
          optimizer.zero_grad();
          model->forward(batch(rank)).square().mean().backward();
          optimizer.step();
        }
        // Momentum for the matrices that this rank updates, two states for its part of the biases, whose sub-buffers are cut anywhere.
        std::int64_t expected = 0;
        for (const auto& unit : sharded.engine()->units()) {
          for (std::size_t i = 0; i < unit->parameters.size(); ++i) {
            if (unit->parameters[i].shape.size() < 2) {
              expected += 2 * static_cast<std::int64_t>(unit->main.parts[unit->layout.positions()[i].sub_buffer].nbytes());
              continue;
            }
            expected += 4 * unit->main_slice(i).numel;
            matrices += static_cast<double>(unit->main_slice(i).numel);
          }
        }
        EXPECT_EQ(sharded.memory_stats().optimizer_state.live, expected) << strategy;
        EXPECT_EQ(sharded.memory_stats().optimizer_state.peak, expected) << strategy;
      }
      EXPECT_EQ(sharded.memory_stats().optimizer_state.live, 0);
      // Every matrix on one rank; replicas on each.
      EXPECT_EQ(mesh.sum(matrices), (60 + 100 + 30) * (strategy == "no_shard" ? static_cast<double>(mesh.size()) : 1));
    }
  });
}

// State of AdamW's own parameters only, also where they lie between matrices.
TEST(Muon, StateOfNeighboursInOneSubBuffer) {
  testing::run_ranks(1, [] {
    Convolution model;
    auto sharded = fully_shard(model, {.granularity = [](const std::string&, const at::Tensor&) { return Granularity::whole(); }});
    Muon optimizer(model, {.matrices = [](const std::string& name) { return name == "table"; }});
    model.loss().backward();
    optimizer.step();
    // Largest first: kernel (72 elements, 80 with padding), table (28, 32), bias (6, 16).
    EXPECT_EQ(sharded.memory_stats().optimizer_state.live, 4 * (28 + 2 * 80 + 2 * (16 + 32 - 28)));
  });
}

TEST(Muon, AGradientOfZeroChangesNothing) {
  testing::run_ranks(1, [] {
    torch::nn::Linear model(torch::nn::LinearOptions(6, 4).bias(false));
    const auto before = model->weight.detach().clone();
    const auto sharded = fully_shard(*model, {.mesh = line(), .granularity = whole_matrices()});
    Muon optimizer(*model, {.lr = 0.1});
    (model->forward(torch::ones({2, 6})) * 0).sum().backward();
    optimizer.step();
    EXPECT_TRUE(torch::equal(sharded.full_parameters()[0].second, before));
  });
}

TEST(Muon, RefusesMatricesThatAreCut) {
  testing::run_ranks(2, [] {
    for (const auto& strategy : testing::all_strategies()) {
      const auto model = make_net();
      (void)fully_shard(*model, {.mesh = line(), .units = each_linear(), .placements = Placements::from_name(strategy)});
      const auto message =
          message_of([&] { Muon optimizer(*model, {.matrices = [](const std::string& name) { return name != "third.weight"; }}); });
      if (strategy == "no_shard") {
        EXPECT_EQ(message, "no error");
      } else {
        EXPECT_TRUE(has(message, "'first.weight' of unit 'first' is cut over several ranks") && has(message, "whole_matrices()") &&
                    has(message, "MuonOptions::matrices"))
            << message;
      }
      // By default what is not whole is AdamW's.
      EXPECT_EQ(message_of([&] { Muon optimizer(*model); }), "no error");
    }
  });
}

TEST(Muon, RefusesBadArguments) {
  testing::run_ranks(1, [] {
    const auto model = make_net();
    (void)fully_shard(*model, {.granularity = whole_matrices()});
    const auto refusal = [&](const MuonOptions& options) { return message_of([&] { Muon optimizer(*model, options); }); };
    EXPECT_TRUE(has(refusal({.lr = -1}), "learning rate -1"));
    EXPECT_TRUE(has(refusal({.weight_decay = -1}), "weight decay -1"));
    EXPECT_TRUE(has(refusal({.momentum = 1}), "momentum must lie in [0, 1)"));
    EXPECT_TRUE(has(refusal({.ns_steps = 0}), "ns_steps must lie in [1, 100)"));
    EXPECT_TRUE(has(refusal({.eps = 0}), "eps must be positive"));
    EXPECT_TRUE(has(refusal({.ns_dtype = at::kInt}), "ns_dtype must be"));
    EXPECT_TRUE(has(refusal({.adamw = {.lr = -3}}), "learning rate -3"));
    EXPECT_EQ(refusal({.lr = 0}), "no error");
  });
}

TEST(WholeMatrices, ByNameAndDimensions) {
  const auto all = whole_matrices();
  EXPECT_EQ(all("w", at::zeros({2, 3})), Granularity::whole());
  EXPECT_EQ(all("w", at::zeros({2, 3, 4})), Granularity::whole());
  EXPECT_EQ(all("b", at::zeros({2})), Granularity::element());
  EXPECT_EQ(all("s", at::zeros({})), Granularity::element());
  const auto blocks = whole_matrices([](const std::string& name) { return name.starts_with("blocks."); });
  EXPECT_EQ(blocks("blocks.0.w", at::zeros({2, 3})), Granularity::whole());
  EXPECT_EQ(blocks("embedding.w", at::zeros({2, 3})), Granularity::element());
}

}  // namespace muon_test
}  // namespace fsdp
