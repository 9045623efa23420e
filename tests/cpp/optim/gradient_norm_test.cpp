#include "fsdp/gradient_norm.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/fsdp.h"
#include "support/twins.h"

namespace fsdp {
namespace gradient_norm_test {

using testing::batch;
using testing::each_linear;
using testing::expect_same;
using testing::has;
using testing::line;
using testing::make_net;
using testing::message_of;
using testing::NamedTensors;
using testing::over_ranks;

constexpr double kInf = std::numeric_limits<double>::infinity();

TEST(ClipGradNorm, IsTorchsAndTheSameForEveryStrategy) {
  over_ranks([](int rank) {
    const auto mesh = line();
    for (const auto& [norm_type, max_norm] : std::vector<std::pair<double, double>>{
             {2, 0.01}, {2, 1e6}, {1, 0.01}, {1, 1e6}, {3, 0.01}, {0.5, 0.01}, {kInf, 0.001}, {kInf, 1e6}}) {
      std::optional<double> first;
      NamedTensors first_gradients;
      for (const auto& strategy : testing::all_strategies()) {
        const auto model = make_net();
        auto sharded = fully_shard(*model, {.mesh = mesh, .units = each_linear(), .placements = Placements::from_name(strategy)});
        model->forward(batch(rank)).square().mean().backward();
        const auto before = sharded.full_gradients();
        const auto plain = make_net();
        auto parameters = plain->parameters();
        for (std::size_t i = 0; i < parameters.size(); ++i) parameters[i].mutable_grad() = before[i].second.clone();
        const double expected = torch::nn::utils::clip_grad_norm_(parameters, max_norm, norm_type);

        const double norm = clip_grad_norm(*model, max_norm, {.norm_type = norm_type});
        EXPECT_NEAR(norm, expected, 1e-5 * expected) << strategy << ", p = " << norm_type;
        EXPECT_GT(norm, 0.001);
        const auto after = sharded.full_gradients();
        expect_same(after, testing::gradients_of(*plain), max_norm > norm ? 0 : 1e-6, strategy);
        if (!first) {
          first = norm;
          first_gradients = after;
        }
        EXPECT_EQ(norm, *first) << strategy;
        expect_same(after, first_gradients, 0, strategy);
        // Once clipped, there is nothing to do.
        if (max_norm < norm) {
          EXPECT_NEAR(clip_grad_norm(*model, max_norm, {.norm_type = norm_type}), max_norm, 1e-6);
        }
      }
    }
  });
}

// In fp64 every rounding shows: the ranks' sums must be added up in the same order, wherever a rank stands in the mesh.
TEST(ClipGradNorm, IsTheSameOnAMeshOfTwoDimensions) {
  testing::run_ranks(4, [](int rank) {
    struct Clipped {
      double norm;
      std::vector<std::pair<std::string, double>> norms;
      NamedTensors gradients;
    };
    const auto clipped = [&](const DeviceMesh& mesh, const Placements& outer, std::uint64_t seed) {
      const auto model = make_net();
      model->to(at::kDouble);
      auto sharded = fully_shard(*model, {.mesh = mesh, .units = each_linear(), .outer_placements = outer});
      model->forward(testing::normal({4, 6}, 10 * seed + static_cast<std::uint64_t>(rank)).to(at::kDouble)).square().mean().backward();
      const auto norms = gradient_norms(*model);
      return Clipped{clip_grad_norm(*model, 0.01), norms, sharded.full_gradients()};
    };
    const auto flat = line();
    const auto grid = testing::plane();
    for (std::uint64_t seed = 1; seed <= 20; ++seed) {
      const auto expected = clipped(flat, Placements::no_shard(), seed);
      for (const auto& outer : {Placements::no_shard(), Placements::optim()}) {
        const auto actual = clipped(grid, outer, seed);
        EXPECT_EQ(actual.norm, expected.norm) << "seed " << seed;
        EXPECT_EQ(actual.norms, expected.norms) << "seed " << seed;
        expect_same(actual.gradients, expected.gradients, 0, "seed " + std::to_string(seed));
      }
    }
  });
}

TEST(ClipGradNorm, CountsWhatHasAGradientOnly) {
  over_ranks([](int rank) {
    for (const auto& strategy : testing::all_strategies()) {
      const auto model = make_net();
      auto sharded = fully_shard(*model, {.mesh = line(),
                                          .units = each_linear(),
                                          .placements = Placements::from_name(strategy),
                                          .granularity = [](const std::string&, const at::Tensor&) { return Granularity::rows(); }});
      EXPECT_EQ(clip_grad_norm(*model, 1), 0) << strategy;
      model->forward(batch(rank)).square().mean().backward();
      sharded.zero_grad();
      EXPECT_EQ(clip_grad_norm(*model, 1), 0) << strategy;
      (3 * model->second->bias.narrow(0, 2, 1).sum() + 4 * model->third->bias.narrow(0, 1, 1).sum()).backward();
      EXPECT_EQ(clip_grad_norm(*model, 100), 5) << strategy;
    }
  });
}

TEST(ClipGradNorm, GradientsThatAreNotFinite) {
  over_ranks([](int rank) {
    const double inf = kInf;
    for (const auto& strategy : testing::all_strategies()) {
      const auto model = make_net();
      auto sharded = fully_shard(*model, {.mesh = line(), .units = each_linear(), .placements = Placements::from_name(strategy)});
      const auto fill = [&](double value) {
        sharded.zero_grad();
        auto loss = model->forward(batch(rank)).square().mean();
        if (rank == 0) loss = loss + value * model->third->bias.narrow(0, 1, 1).sum();  // One element, one rank.
        loss.backward();
      };
      fill(inf);
      const auto before = sharded.full_gradients();
      const auto message = message_of([&] { clip_grad_norm(*model, 1, {.error_if_nonfinite = true}); });
      EXPECT_TRUE(has(message, "norm is inf") && has(message, "unchanged")) << strategy << ": " << message;
      expect_same(sharded.full_gradients(), before, 0, strategy);

      // Without, as torch: the factor is 0, so only what is infinite is lost.
      EXPECT_EQ(clip_grad_norm(*model, 1), inf) << strategy;
      EXPECT_EQ(sharded.full_gradients()[0].second.count_nonzero().item<std::int64_t>(), 0) << strategy;
      EXPECT_TRUE(std::isnan(sharded.full_gradients()[5].second[1].item<float>())) << strategy;

      fill(std::nan(""));
      EXPECT_TRUE(has(message_of([&] { clip_grad_norm(*model, 1, {.error_if_nonfinite = true}); }), "norm is nan")) << strategy;
      EXPECT_TRUE(std::isnan(clip_grad_norm(*model, 1))) << strategy;
      EXPECT_TRUE(sharded.full_gradients()[0].second.isnan().all().item<bool>()) << strategy;
    }
  });
}

TEST(ClipGradNorm, RefusesABadBound) {
  testing::run_ranks(1, [] {
    const auto model = make_net();
    (void)fully_shard(*model, {});
    for (const double bound : {0.0, -1.0, std::nan("")}) {
      EXPECT_TRUE(has(message_of([&] { clip_grad_norm(*model, bound); }), "max_norm must be positive")) << bound;
    }
    EXPECT_EQ(clip_grad_norm(*model, std::numeric_limits<double>::infinity()), 0);
  });
}

// Whatever p, NaN is not lost: also not in a maximum, and on whichever rank.
TEST(ClipGradNorm, NaNCountsForEveryNorm) {
  over_ranks([](int rank) {
    const auto mesh = line();
    for (const double norm_type : {0.5, 1.0, 2.0, 3.0, kInf}) {
      for (std::int64_t element = 0; element < 100; element += 33) {  // on one rank or the other
        const auto model = make_net();
        const auto sharded = fully_shard(*model, {.mesh = mesh, .units = each_linear()});
        auto loss = model->second->weight.square().sum();
        if (rank == mesh.size() - 1) loss = loss + std::nan("") * model->second->weight.flatten()[element];
        loss.backward();
        EXPECT_TRUE(std::isnan(clip_grad_norm(*model, 1, {.norm_type = norm_type}))) << norm_type << ", " << element;
      }
    }
  });
}

TEST(GradientNorms, AreTorchsByName) {
  over_ranks([](int rank) {
    for (const double norm_type : {0.5, 1.0, 2.0, 3.0, kInf}) {
      std::vector<std::pair<std::string, double>> first;
      for (const auto& strategy : testing::all_strategies()) {
        const auto model = make_net();
        auto sharded = fully_shard(*model, {.mesh = line(), .units = each_linear(), .placements = Placements::from_name(strategy)});
        EXPECT_TRUE(gradient_norms(*model, norm_type).empty());
        const auto x = batch(rank).matmul(model->first->weight.t());  // Without the bias.
        model->third(model->second(x)).square().mean().backward();
        const auto norms = gradient_norms(*model, norm_type);
        std::vector<std::pair<std::string, double>> expected;
        for (const auto& [name, gradient] : sharded.full_gradients()) {
          if (gradient.defined()) expected.emplace_back(name, gradient.to(at::kDouble).norm(norm_type).item<double>());
        }
        ASSERT_EQ(norms.size(), 5U);
        ASSERT_EQ(norms.size(), expected.size());
        for (std::size_t i = 0; i < norms.size(); ++i) {
          EXPECT_EQ(norms[i].first, expected[i].first);
          EXPECT_NEAR(norms[i].second, expected[i].second, 1e-12 * expected[i].second) << norms[i].first << ", p = " << norm_type;
        }
        if (first.empty()) first = norms;
        EXPECT_EQ(norms, first) << strategy;
      }
    }
  });
}

TEST(GradientNorms, OneExchangeOfEightBytesPerParameter) {
  over_ranks([](int rank) {
    const auto mesh = line();
    const auto model = make_net();
    auto sharded = fully_shard(*model, {.mesh = mesh, .units = each_linear()});
    model->forward(batch(rank)).square().mean().backward();
    sharded.reset_wire_stats();
    EXPECT_EQ(gradient_norms(*model).size(), 6U);
    EXPECT_EQ(sharded.wire_stats().control_bytes, (mesh.size() - 1) * 6 * 8);
  });
}

/// Parameters of several dtypes.
struct Dtypes : torch::nn::Module {
  Dtypes()
      : single(register_parameter("single", testing::normal({37}, 1))),
        twice(register_parameter("twice", testing::normal({29}, 2).to(at::kDouble))),
        brain(register_parameter("brain", testing::normal({41}, 3).to(at::kBFloat16))),
        half(register_parameter("half", testing::normal({43}, 4).to(at::kHalf))) {}
  at::Tensor loss() const {
    return single.square().sum() + twice.square().sum() + brain.to(at::kFloat).pow(3).sum() + half.to(at::kFloat).pow(3).sum();
  }
  at::Tensor single, twice, brain, half;
};

TEST(GradientNorms, OfEveryDtype) {
  over_ranks([] {
    Dtypes model;
    auto sharded = fully_shard(model, {.mesh = line()});
    model.loss().backward();
    std::map<std::string, at::Tensor> gradients;
    for (const auto& [name, gradient] : sharded.full_gradients()) gradients[name] = gradient.to(at::kDouble);
    double sum = 0;
    for (const auto& [name, norm] : gradient_norms(model)) {
      const double expected = gradients[name].norm().item<double>();
      EXPECT_NEAR(norm, expected, 1e-12 * expected) << name;
      sum += norm * norm;
    }
    EXPECT_NEAR(clip_grad_norm(model, 1e9), std::sqrt(sum), 1e-12 * std::sqrt(sum));
  });
}

TEST(GradientNorms, RefuseABadNorm) {
  testing::run_ranks(1, [] {
    const auto model = make_net();
    (void)fully_shard(*model, {});
    for (const double norm_type : {0.0, -1.0, std::nan("")}) {
      EXPECT_TRUE(has(message_of([&] { gradient_norms(*model, norm_type); }), "norm_type must be positive")) << norm_type;
      EXPECT_TRUE(has(message_of([&] { clip_grad_norm(*model, 1, {.norm_type = norm_type}); }), "norm_type must be positive")) << norm_type;
    }
  });
}

TEST(ClipGradNorm, IsAMethodOfTheHandleToo) {
  over_ranks([](int rank) {
    const auto by_function = make_net();
    const auto by_method = make_net();
    const auto first = fully_shard(*by_function, {.mesh = line(), .units = each_linear()});
    auto second = fully_shard(*by_method, {.mesh = line(), .units = each_linear()});
    by_function->forward(batch(rank)).square().mean().backward();
    by_method->forward(batch(rank)).square().mean().backward();
    EXPECT_EQ(second.clip_grad_norm(0.01, {.norm_type = 1}), clip_grad_norm(*by_function, 0.01, {.norm_type = 1}));
    EXPECT_EQ(second.clip_grad_norm(0.005), clip_grad_norm(*by_function, 0.005));
    // The whole model's, by the handle of a unit as well.
    EXPECT_EQ(handle(*by_method->third).clip_grad_norm(0.001), clip_grad_norm(*by_function, 0.001));
    expect_same(second.full_gradients(), first.full_gradients(), 0, "clipped");
    EXPECT_TRUE(has(message_of([&] { second.clip_grad_norm(-1); }), "max_norm must be positive"));
  });
}

TEST(ParameterNorms, AreTorchsByName) {
  over_ranks([](int rank) {
    for (const double norm_type : {0.5, 1.0, 2.0, 3.0, kInf}) {
      std::vector<std::pair<std::string, double>> first;
      for (const auto& strategy : testing::all_strategies()) {
        const auto model = make_net();
        model->second->bias.set_requires_grad(false);
        auto sharded = fully_shard(*model, {.mesh = line(), .units = each_linear(), .placements = Placements::from_name(strategy)});
        {
          const torch::NoGradGuard no_grad;
          model->third->bias.mul_(5);  // Still in the gathered copy only.
        }
        const auto norms = parameter_norms(*model, norm_type);
        const auto plain = make_net();
        const auto whole = plain->named_parameters();
        ASSERT_EQ(norms.size(), whole.size());
        for (std::size_t i = 0; i < norms.size(); ++i) {
          EXPECT_EQ(norms[i].first, whole[i].key());
          const double expected = whole[i].value().detach().to(at::kDouble).norm(norm_type).item<double>() * (i == 5 ? 5 : 1);
          EXPECT_NEAR(norms[i].second, expected, (i == 5 ? 1e-6 : 1e-12) * expected) << norms[i].first << ", p = " << norm_type;
        }
        if (first.empty()) first = norms;
        EXPECT_EQ(norms, first) << strategy;
      }
    }
  });
}

/// Frozen parameters of dtypes that no gradient has.
TEST(ParameterNorms, OfEveryDtype) {
  over_ranks([] {
    struct Table : torch::nn::Module {
      Table() {
        register_parameter("integers", at::arange(-20, 17, at::kLong), false);
        register_parameter("booleans", at::ones({5}, at::kBool), false);
        register_parameter("complex", at::full({3}, c10::complex<double>(3, -4), at::kComplexDouble), false);
        register_parameter("eight_bits", at::full({9}, 2.0, at::kFloat).to(at::kFloat8_e4m3fn), false);
        register_parameter("empty", at::zeros({0}), false);
      }
    };
    Table table;
    const auto sharded = fully_shard(table, {.mesh = line()});
    const auto norms = parameter_norms(table);
    ASSERT_EQ(norms.size(), 5U);
    EXPECT_NEAR(norms[0].second, std::sqrt(2870.0 + 1496.0), 1e-12 * 70);
    EXPECT_EQ(norms[1].second, std::sqrt(5.0));
    EXPECT_NEAR(norms[2].second, std::sqrt(75.0), 1e-12);
    EXPECT_EQ(norms[3].second, 6);
    EXPECT_EQ(norms[4].second, 0);
    EXPECT_EQ(parameter_norms(table, kInf)[0].second, 20);
  });
}

/// The norm of the whole, of which each rank of the other dimension has a piece; what all of them have counts once.
TEST(ParameterNorms, OfTensorParallelWholes) {
  testing::run_ranks(4, [] {
    const auto grid = init_device_mesh("cpu", {{"dp", 2}, {"tp", 2}});
    const auto whole = testing::normal({7, 5}, 3);
    const auto bias = testing::normal({7}, 4);
    const auto gain = testing::normal({5}, 5);
    struct Piece : torch::nn::Module {};
    Piece piece;
    const auto mine = [&](const at::Tensor& tensor) {
      return grid.coordinate("tp") == 0 ? tensor.narrow(0, 0, 4).clone() : tensor.narrow(0, 4, 3).clone();
    };
    const auto weight = piece.register_parameter("weight", mine(whole));
    const auto own_bias = piece.register_parameter("bias", mine(bias));
    const auto own_gain = piece.register_parameter("gain", gain.clone());
    auto sharded = fully_shard(
        piece, {.mesh = grid["dp"], .tensor_parallel = [&](const std::string& name, const at::Tensor&) -> std::optional<TensorParallel> {
                  if (name == "gain") return std::nullopt;
                  return TensorParallel{grid["tp"], 0};
                }});
    (weight.square().sum() + own_bias.square().sum() + own_gain.square().sum()).backward();
    for (const double norm_type : {1.0, 2.0, 3.0, kInf}) {
      const auto norms = parameter_norms(piece, norm_type);
      const auto gradients = gradient_norms(piece, norm_type);
      ASSERT_EQ(norms.size(), 3U);
      ASSERT_EQ(gradients.size(), 3U);
      const std::vector<at::Tensor> wholes = {whole, bias, gain};
      for (std::size_t i = 0; i < 3; ++i) {
        const double expected = wholes[i].to(at::kDouble).norm(norm_type).item<double>();
        EXPECT_NEAR(norms[i].second, expected, 1e-12 * expected) << norms[i].first << ", p = " << norm_type;
        EXPECT_NEAR(gradients[i].second, 2 * expected, 1e-12 * expected) << norms[i].first << ", p = " << norm_type;
      }
    }
  });
}

TEST(ParameterNorms, RefuseABadNorm) {
  testing::run_ranks(1, [] {
    const auto model = make_net();
    (void)fully_shard(*model, {});
    EXPECT_TRUE(has(message_of([&] { parameter_norms(*model, 0); }), "parameter_norms: norm_type must be positive"));
  });
}

}  // namespace gradient_norm_test
}  // namespace fsdp
