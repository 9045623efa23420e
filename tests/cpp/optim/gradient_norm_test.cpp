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
    for (const auto [norm_type, max_norm] : std::vector<std::pair<double, double>>{
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
        if (max_norm < norm) EXPECT_NEAR(clip_grad_norm(*model, max_norm, {.norm_type = norm_type}), max_norm, 1e-6);
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

}  // namespace gradient_norm_test
}  // namespace fsdp
