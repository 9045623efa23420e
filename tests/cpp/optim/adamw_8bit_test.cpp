// AdamW with 8-bit state, against the algorithm written out on whole tensors.

#include "fsdp/adamw_8bit.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "fsdp/fsdp.h"
#include "support/brute_force_map.h"
#include "support/temporary_folder.h"
#include "support/twins.h"

namespace fsdp {
namespace adamw_8bit_test {

using testing::BruteForceMap;
using testing::expect_same;
using testing::has;
using testing::line;
using testing::message_of;
using testing::NamedTensors;
using testing::normal;
using testing::over_ranks;

Granularity in_blocks(const std::string&, const at::Tensor&) { return Granularity::blocks(256); }

/// Parameters of many blocks, whole and not, and of less than one.
struct Model : torch::nn::Module {
  Model()
      : even(register_parameter("even", normal({32, 48}, 1))),    // 6 blocks
        ragged(register_parameter("ragged", normal({1000}, 2))),  // 3 blocks and a part
        small(register_parameter("small", normal({7}, 3))),
        wide(register_parameter("wide", normal({3, 700}, 4))) {}
  at::Tensor even, ragged, small, wide;
};

/// A loss whose gradients are exact numbers of very different sizes, the same on every rank: so is their mean.
at::Tensor loss_of(const torch::nn::Module& model, int step) {
  at::Tensor loss = at::zeros({});
  auto seed = static_cast<std::uint64_t>(100 * step);
  for (const auto& item : model.named_parameters()) {
    const auto scale = at::pow(2.0, (4 * normal(item.value().sizes(), ++seed)).round());
    const auto gradient = (8 * normal(item.value().sizes(), ++seed)).round() * scale;
    loss = loss + (item.value() * gradient).sum();
  }
  return loss;
}

/// One parameter, element by element: state is decoded, updated and encoded by search.
class Reference {
 public:
  explicit Reference(AdamW8bitOptions options) : options_(options) {}
  void set_lr(double lr) { options_.lr = lr; }

  void step(const std::string& name, at::Tensor& value, const at::Tensor& gradient) {
    auto& state = states_[name];
    const auto numel = static_cast<std::size_t>(value.numel());
    if (state.first.empty()) {
      state.first.assign(numel, 0);
      state.second.assign(numel, 0);
    }
    ++state.steps;
    const auto [beta1, beta2] = options_.betas;
    const auto b1 = static_cast<float>(beta1);
    const auto b2 = static_cast<float>(beta2);
    const auto step_size = static_cast<float>(options_.lr / (1 - std::pow(beta1, state.steps)));
    const auto root = static_cast<float>(1 / std::sqrt(1 - std::pow(beta2, state.steps)));
    const auto decay = static_cast<float>(1 - options_.lr * options_.weight_decay);
    auto* p = value.data_ptr<float>();
    const auto* g = gradient.const_data_ptr<float>();
    for (std::size_t i = 0; i < numel; ++i) {
      state.first[i] = b1 * state.first[i] + (1 - b1) * g[i];
      state.second[i] = b2 * state.second[i] + (1 - b2) * (g[i] * g[i]);
      const float denominator = std::sqrt(state.second[i]) * root + static_cast<float>(options_.eps);
      p[i] = p[i] * decay - step_size * (state.first[i] / denominator);
    }
    if (value.numel() < options_.min_8bit_size) return;
    for (std::size_t begin = 0; begin < numel; begin += 256) {
      const std::size_t end = std::min(begin + 256, numel);
      quantize(signed_, state.first, begin, end);
      quantize(unsigned_, state.second, begin, end);
    }
  }

 private:
  struct State {
    std::vector<float> first, second;
    int steps = 0;
  };

  /// What encoding and decoding make of a block.
  static void quantize(const BruteForceMap& map, std::vector<float>& state, std::size_t begin, std::size_t end) {
    float largest = 0;
    for (std::size_t i = begin; i < end; ++i) largest = std::max(largest, std::abs(state[i]));
    for (std::size_t i = begin; i < end; ++i) {
      state[i] = largest == 0 ? 0 : map.values[map.nearest(state[i] / largest)] * largest;
    }
  }

  AdamW8bitOptions options_;
  BruteForceMap signed_{true};
  BruteForceMap unsigned_{false};
  std::map<std::string, State> states_;
};

TEST(AdamW8bit, IsTheAlgorithmOnWholeParameters) {
  over_ranks([] {
    for (const auto& options : {AdamW8bitOptions{.lr = 1e-2, .min_8bit_size = 0},
                                AdamW8bitOptions{.lr = 0.1, .betas = {0.5, 0.9}, .eps = 1e-4, .weight_decay = 0.3, .min_8bit_size = 1}}) {
      for (const auto& strategy : testing::all_strategies()) {
        Model model;
        auto sharded = fully_shard(model, {.mesh = line(), .placements = Placements::from_name(strategy), .granularity = in_blocks});
        AdamW8bit optimizer(model, options);
        Reference reference(options);
        auto whole = testing::values_of(Model());
        for (int step = 0; step < 6; ++step) {
          optimizer.zero_grad();
          loss_of(model, step).backward();
          const auto gradients = sharded.full_gradients();
          optimizer.step();
          for (std::size_t i = 0; i < whole.size(); ++i) reference.step(whole[i].first, whole[i].second, gradients[i].second);
          expect_same(sharded.full_parameters(), whole, 0, strategy + ", step " + std::to_string(step));
        }
      }
    }
  });
}

NamedTensors trained(const std::string& strategy, const AdamW8bitOptions& options) {
  Model model;
  auto sharded = fully_shard(model, {.mesh = line(), .placements = Placements::from_name(strategy), .granularity = in_blocks});
  AdamW8bit optimizer(model, options);
  for (int step = 0; step < 5; ++step) {
    optimizer.zero_grad();
    loss_of(model, step).backward();
    optimizer.step();
  }
  return sharded.full_parameters();
}

TEST(AdamW8bit, SameBitsForEveryStrategyAndNumberOfRanks) {
  const AdamW8bitOptions options{.lr = 1e-2, .min_8bit_size = 100};
  const std::string file = ::testing::TempDir() + "adamw_8bit_" + std::to_string(getpid()) + ".pt";
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
      for (std::size_t i = 0; i < values.size(); ++i) {
        EXPECT_TRUE(torch::equal(values[i].second, expected[i])) << strategy << ": " << values[i].first;
      }
    }
  });
  std::remove(file.c_str());
}

// Small ones, and doubles, are AdamW's to the last bit.
TEST(AdamW8bit, SmallParametersKeepFullState) {
  over_ranks([] {
    NamedTensors results[2];
    for (const bool eight_bits : {true, false}) {
      Model model;
      auto sharded = fully_shard(model, {.mesh = line()});
      const AdamWOptions full{.lr = 0.02};
      Optimizer optimizer = eight_bits ? static_cast<Optimizer>(AdamW8bit(model, {.lr = 0.02, .min_8bit_size = 5000}))
                                       : static_cast<Optimizer>(AdamW(model, full));
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        loss_of(model, step).backward();
        optimizer.step();
      }
      results[eight_bits ? 0 : 1] = sharded.full_parameters();
    }
    expect_same(results[0], results[1], 0, "full state");
  });
}

TEST(AdamW8bit, StateIsAQuarter) {
  over_ranks([] {
    const auto mesh = line();
    for (const auto& strategy : testing::all_strategies()) {
      torch::nn::Module model;
      const auto weight = model.register_parameter("weight", normal({64, 256}, 1));  // 64 blocks
      const auto bias = model.register_parameter("bias", normal({64}, 2));
      auto sharded = fully_shard(
          model,
          {.mesh = mesh, .placements = Placements::from_name(strategy), .granularity = [](const std::string& name, const at::Tensor&) {
             return name == "weight" ? Granularity::blocks(256) : Granularity::element();
           }});
      {
        AdamW8bit optimizer(model);
        (weight.square().sum() + bias.square().sum()).backward();
        EXPECT_EQ(sharded.memory_stats().optimizer_state.live, 0);
        optimizer.step();
        const std::int64_t owned = strategy == "no_shard" ? 64 * 256 : 64 * 256 / mesh.size();
        const std::int64_t bias_bytes = strategy == "no_shard" ? 64 * 4 : 64 * 4 / mesh.size();
        // 2 + 8/256 bytes per element, and AdamW's 8 for the bias.
        EXPECT_EQ(sharded.memory_stats().optimizer_state.live, 2 * owned + 8 * owned / 256 + 2 * bias_bytes) << strategy;
      }
      EXPECT_EQ(sharded.memory_stats().optimizer_state.live, 0);
    }
  });
}

TEST(AdamW8bit, ParametersOfEveryDtype) {
  over_ranks([] {
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
      torch::nn::Module model;
      torch::nn::Module twin;
      const auto value = normal({3, 512}, 1).to(dtype);
      const auto weight = model.register_parameter("weight", value.clone());
      auto sharded = fully_shard(model, {.mesh = line(), .granularity = in_blocks});
      AdamW8bit optimizer(model, {.lr = 0.01, .min_8bit_size = 0});
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        weight.to(at::kFloat).square().sum().backward();
        optimizer.step();
      }
      const auto moved = (sharded.full_parameters()[0].second - value).to(at::kDouble);
      // Each step moves an element by about the learning rate, towards zero.
      EXPECT_GT(moved.abs().median().item<double>(), 0.02) << dtype;
      EXPECT_LT(moved.abs().max().item<double>(), 0.08) << dtype;
    }
  });
}

// The dtypes that count are those of the main parameters and gradients, and not the one that a parameter had before.
TEST(AdamW8bit, TakesMainDtypesOfAPolicy) {
  over_ranks([] {
    using fsdp::MixedPrecisionPolicy;
    const auto moved_by = [](const std::optional<MixedPrecisionPolicy>& policy) {
      torch::nn::Module model;
      const auto value = normal({3, 512}, 1);
      const auto weight = model.register_parameter("weight", value.clone());
      auto sharded = fully_shard(model, {.mesh = line(), .granularity = in_blocks, .mixed_precision = policy});
      AdamW8bit optimizer(model, {.lr = 0.01, .min_8bit_size = 0});
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        weight.square().sum().backward();
        optimizer.step();
      }
      return (sharded.full_parameters()[0].second - value).to(at::kDouble);
    };
    const auto expected = moved_by(std::nullopt);
    EXPECT_TRUE(at::equal(moved_by(MixedPrecisionPolicy{.main_grads_dtype = at::kDouble}), expected));
    // In fp64, it keeps full state.
    const auto in_full = moved_by(MixedPrecisionPolicy{.main_params_dtype = at::kDouble});
    EXPECT_TRUE(at::allclose(in_full, expected, 0, 0.01));
    EXPECT_GT(in_full.abs().median().item<double>(), 0.02);
  });
}

/// Fits a small network; the mean loss of the last steps.
template <typename MakeOptimizer>
double fit(const MakeOptimizer& make_optimizer) {
  torch::manual_seed(3);
  torch::nn::Sequential model(torch::nn::Linear(16, 128), torch::nn::GELU(), torch::nn::Linear(128, 128), torch::nn::GELU(),
                              torch::nn::Linear(128, 4));
  const auto mesh = line();
  (void)fully_shard(*model, {.mesh = mesh, .units = testing::each_linear(), .granularity = in_blocks});
  auto optimizer = make_optimizer(*model);
  const auto truth = normal({16, 4}, 9);
  double loss_sum = 0;
  for (int step = 0; step < 200; ++step) {
    const auto x = normal({64, 16}, static_cast<std::uint64_t>(1000 + 10 * step + mesh.rank()));
    const auto loss = at::mse_loss(model->forward(x), at::tanh(x.matmul(truth)));
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    if (step >= 180) loss_sum += mesh.sum(loss.template item<double>()) / static_cast<double>(mesh.size()) / 20;
  }
  return loss_sum;
}

TEST(AdamW8bit, TrainsAsWellAsAdamW) {
  testing::run_ranks(2, [] {
    const double full = fit([](torch::nn::Module& module) { return AdamW(module, {.lr = 3e-3}); });
    const double eight_bits = fit([](torch::nn::Module& module) { return AdamW8bit(module, {.lr = 3e-3, .min_8bit_size = 0}); });
    EXPECT_LT(full, 0.1);
    EXPECT_LT(eight_bits, 1.15 * full);
  });
}

/// One whole parameter by ATen's fused kernel: what parameters below min_8bit_size get.
class FullState {
 public:
  explicit FullState(AdamW8bitOptions options) : options_(options) {}
  void set_lr(double lr) { options_.lr = lr; }
  void step(at::Tensor& value, const at::Tensor& gradient) {
    if (!step_.defined()) {
      first_ = at::zeros_like(value);
      second_ = at::zeros_like(value);
      step_ = at::zeros({}, at::kFloat);
    }
    step_ += 1;
    at::_fused_adamw_({value}, {gradient}, {first_}, {second_}, {}, {step_}, options_.lr, std::get<0>(options_.betas),
                      std::get<1>(options_.betas), options_.weight_decay, options_.eps, false, false);
  }

 private:
  AdamW8bitOptions options_;
  at::Tensor first_, second_, step_;
};

/// A group's settings, and a schedule's factor, reach parameters with 8-bit state and with full state; the first match wins, and it may set
/// one of the two alone.
TEST(AdamW8bit, GroupsAndLearningRates) {
  over_ranks([] {
    const AdamW8bitOptions options{.lr = 0.02, .weight_decay = 0.1, .min_8bit_size = 100};
    const AdamW8bitOptions special{.lr = 0.005, .weight_decay = 0, .min_8bit_size = 100};
    const AdamW8bitOptions decayed{.lr = 0.02, .weight_decay = 0.3, .min_8bit_size = 100};
    Model model;
    auto sharded = fully_shard(model, {.mesh = line(), .granularity = in_blocks});
    const std::vector<ParamGroup> groups = {
        {.matches = [](const std::string& name) { return name == "ragged" || name == "small"; }, .lr = 0.005, .weight_decay = 0.0},
        {.matches = [](const std::string& name) { return name != "even"; }, .weight_decay = 0.3}};
    AdamW8bit optimizer(model, options, groups);
    Reference for_even(options);
    Reference for_ragged(special);
    Reference for_wide(decayed);
    FullState for_small(special);
    auto whole = testing::values_of(Model());
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      loss_of(model, step).backward();
      const auto gradients = sharded.full_gradients();
      const double factor = step == 0 ? 1 : 0.5;
      optimizer.set_lr_factor(factor);
      EXPECT_EQ(optimizer.lr(), 0.02 * factor);
      optimizer.step();
      for_even.set_lr(0.02 * factor);
      for_ragged.set_lr(0.005 * factor);
      for_wide.set_lr(0.02 * factor);
      for_small.set_lr(0.005 * factor);
      const auto of = [&](std::size_t i, Reference& reference) { reference.step(whole[i].first, whole[i].second, gradients[i].second); };
      of(0, for_even);
      of(1, for_ragged);
      for_small.step(whole[2].second, gradients[2].second);
      of(3, for_wide);
      expect_same(sharded.full_parameters(), whole, 0, "step " + std::to_string(step));
    }
  });
}

TEST(AdamW8bit, RefusesBlocksThatAreCut) {
  testing::run_ranks(2, [] {
    const auto refusal = [](const Granularity& granularity, const std::string& strategy) {
      torch::nn::Module model;
      model.register_parameter("weight", at::zeros({50, 100}));
      (void)fully_shard(model, {.mesh = line(),
                                .placements = Placements::from_name(strategy),
                                .granularity = [&](const std::string&, const at::Tensor&) { return granularity; }});
      return message_of([&] { AdamW8bit optimizer(model); });
    };
    for (const auto& cut : {Granularity::element(), Granularity::rows(), Granularity::blocks(100)}) {
      const auto message = refusal(cut, "optim");
      EXPECT_TRUE(has(message, "parameter 'weight' of unit '(root)' is cut within blocks of 256") &&
                  has(message, "Granularity::blocks(256)"))
          << message;
      EXPECT_EQ(refusal(cut, "no_shard"), "no error");
    }
    for (const auto& fine : {Granularity::blocks(256), Granularity::blocks(512), Granularity::whole()}) {
      EXPECT_EQ(refusal(fine, "optim_grads_params"), "no error");
    }
  });
}

// Where every rank has all of a parameter, blocks may lie across the parts that the ranks save.
TEST(AdamW8bit, EachBlockIsSavedOnce) {
  const testing::TemporaryFolder folder;
  for (const int ranks : {2, 4}) {
    testing::run_ranks(ranks, [&] {
      const auto replicas = init_device_mesh("cpu", {{"dp_outer", -1}, {"dp_shard", 1}});
      const auto half = init_device_mesh("cpu", {{"dp_outer", 2}, {"dp_shard", -1}});
      const std::vector<FullyShardOptions> shardings = {
          {.mesh = line(), .placements = Placements::no_shard()}, {.mesh = half, .placements = Placements::no_shard()}, {.mesh = replicas}};
      for (std::size_t k = 0; k < shardings.size(); ++k) {
        const std::string what = "sharding " + std::to_string(k);
        const auto path = (folder.path() / (std::to_string(ranks) + "-" + std::to_string(k))).string();
        Model model;
        Model other;
        auto sharded = fully_shard(model, shardings[k]);
        auto loaded = fully_shard(other, shardings[k]);
        AdamW8bit optimizer(model, {.lr = 1e-2, .min_8bit_size = 100});
        AdamW8bit other_optimizer(other, {.lr = 1e-2, .min_8bit_size = 100});
        const auto train = [](Model& trained, Optimizer& by, int step) {
          by.zero_grad();
          loss_of(trained, step).backward();
          by.step();
        };
        train(model, optimizer, 0);
        train(other, other_optimizer, 5);
        EXPECT_EQ(message_of([&] { save(path, model, optimizer); }), "no error") << what;
        EXPECT_EQ(message_of([&] { load(path, other, other_optimizer); }), "no error") << what;
        train(model, optimizer, 1);
        train(other, other_optimizer, 1);
        expect_same(loaded.full_parameters(), sharded.full_parameters(), 0, what);
      }
    });
  }
}

TEST(AdamW8bit, RefusesBadArguments) {
  testing::run_ranks(1, [] {
    Model model;
    (void)fully_shard(model, {});
    const auto refusal = [&](const AdamW8bitOptions& options) { return message_of([&] { AdamW8bit optimizer(model, options); }); };
    EXPECT_TRUE(has(refusal({.lr = -1}), "learning rate -1"));
    EXPECT_TRUE(has(refusal({.betas = {1, 0.9}}), "betas must lie in [0, 1)"));
    EXPECT_TRUE(has(refusal({.eps = std::nan("")}), "eps must be at least 0"));
    EXPECT_TRUE(has(refusal({.weight_decay = -2}), "weight decay -2"));
    EXPECT_EQ(refusal({}), "no error");
  });
}

}  // namespace adamw_8bit_test
}  // namespace fsdp
