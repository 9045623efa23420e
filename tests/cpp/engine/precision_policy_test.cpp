// What each field of a MixedPrecisionPolicy, and a gather format of one's own, change: dtypes, bytes and bits, against arithmetic that does
// not go through the library.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/fsdp.h"
#include "support/twins.h"

namespace fsdp {
namespace precision_policy_test {

using testing::all_strategies;
using testing::batch;
using testing::each_linear;
using testing::expect_same;
using testing::line;
using testing::make_net;
using testing::NamedTensors;
using testing::Net;
using testing::normal;
using testing::over_ranks;
using testing::values_of;

/// One parameter of 256 elements. Its gradient is what the caller says.
struct Weight : torch::nn::Module {
  Weight() : weight(register_parameter("weight", at::zeros({256}))) {}
  void backward(double gradient) { (weight * gradient).sum().backward(); }
  at::Tensor weight;
};

struct Gradient {
  at::ScalarType dtype;
  double value = 0;
  std::int64_t live_bytes = 0;
};

/// A backward whose gradient is 1, and eight of 2^-9 each: in bf16, whose next number after 1 is 1 + 2^-7, the latter are lost one by one.
Gradient add_up(const MixedPrecisionPolicy& policy, Placements placements, bool in_one_reduction) {
  Weight model;
  auto sharded = fully_shard(model, {.mesh = line(), .placements = placements, .mixed_precision = policy});
  for (int k = 0; k < 9; ++k) {
    sharded.set_requires_gradient_sync(!in_one_reduction || k == 8);
    model.backward(k == 0 ? 1.0 : std::ldexp(1.0, -9));
  }
  const auto gradient = sharded.full_gradients()[0].second;
  EXPECT_TRUE(gradient.eq(gradient[0]).all().item<bool>());
  EXPECT_EQ(sharded.gradient_shards()[0].value.scalar_type(), gradient.scalar_type());
  return {gradient.scalar_type(), gradient[0].item<double>(), sharded.memory_stats().main_gradients.live};
}

TEST(PrecisionPolicy, GradientsAddUpInMainGradsDtype) {
  over_ranks([] {
    const auto ranks = line().size();
    const double all = 1 + std::ldexp(1.0, -6);
    for (const auto& strategy : all_strategies()) {
      const auto placements = Placements::from_name(strategy);
      const auto held = placements.gradients == Placement::kReplicated ? 256 : 256 / ranks;
      for (const bool in_one_reduction : {true, false}) {
        const auto what = strategy + (in_one_reduction ? ", one reduction" : ", nine reductions");
        for (const auto compute : {at::kFloat, at::kBFloat16}) {
          // The main parameters' dtype, where none is named.
          auto gradient = add_up({.param_dtype = compute}, placements, in_one_reduction);
          EXPECT_EQ(gradient.dtype, at::kFloat) << what;
          EXPECT_EQ(gradient.value, all) << what;
          EXPECT_EQ(gradient.live_bytes, 4 * held) << what;
          gradient = add_up({.param_dtype = compute, .main_grads_dtype = at::kBFloat16}, placements, in_one_reduction);
          EXPECT_EQ(gradient.dtype, at::kBFloat16) << what;
          EXPECT_EQ(gradient.value, 1) << what;
          EXPECT_EQ(gradient.live_bytes, 2 * held) << what;
          gradient = add_up({.param_dtype = compute, .main_grads_dtype = at::kDouble}, placements, in_one_reduction);
          EXPECT_EQ(gradient.dtype, at::kDouble) << what;
          EXPECT_EQ(gradient.value, all) << what;
          EXPECT_EQ(gradient.live_bytes, 8 * held) << what;
          // Wide sums that travel in few bits: converted once each, when they travel.
          gradient = add_up({.param_dtype = compute, .main_grads_dtype = at::kFloat, .grad_comm_dtype = at::kBFloat16}, placements,
                            in_one_reduction);
          EXPECT_EQ(gradient.dtype, at::kFloat) << what;
          EXPECT_EQ(gradient.value, all) << what;
        }
      }
    }
  });
}

/// The optimizer takes gradients in whatever dtype they are kept.
TEST(PrecisionPolicy, TheOptimizerReadsMainGradsDtype) {
  over_ranks([] {
    for (const auto dtype : {at::kBFloat16, at::kHalf, at::kDouble}) {
      Weight model;
      auto sharded = fully_shard(model, {.mesh = line(), .mixed_precision = MixedPrecisionPolicy{.main_grads_dtype = dtype}});
      SGD optimizer(model, {.lr = 0.5});
      model.backward(1 + std::ldexp(1.0, -12));  // bf16 and half have no such number
      optimizer.step();
      const auto value = sharded.full_parameters()[0].second;
      EXPECT_EQ(value.scalar_type(), at::kFloat);
      EXPECT_EQ(value[255].item<double>(), dtype == at::kDouble ? -0.5 - std::ldexp(1.0, -13) : -0.5) << dtype;
    }
  });
}

/// Remembers the dtypes with which its forward was called.
struct Probe : torch::nn::Module {
  Probe() : weight(register_parameter("weight", normal({6, 5}, 1))) {}
  at::Tensor forward(const at::Tensor& x, const at::Tensor& rows) {
    seen = {x.scalar_type(), rows.scalar_type()};
    return x.index_select(0, rows).to(weight.scalar_type()).matmul(weight);
  }
  at::Tensor weight;
  std::vector<at::ScalarType> seen;
};

TEST(PrecisionPolicy, CastForwardInputs) {
  over_ranks([](int rank) {
    const auto x = normal({4, 6}, 50 + static_cast<std::uint64_t>(rank));
    const auto rows = at::tensor({2, 0, 3}, at::kLong);
    for (const auto dtype : {at::kBFloat16, at::kHalf}) {
      const auto expected = x.index_select(0, rows).to(dtype).matmul(Probe().weight.detach().to(dtype));
      const auto seen = [&](const MixedPrecisionPolicy& policy) {
        const auto model = std::make_shared<Probe>();
        const auto sharded = fully_shard(*model, {.mesh = line(), .mixed_precision = policy});
        const auto output = fsdp::forward(model, x, rows);
        EXPECT_TRUE(torch::equal(output, expected));
        EXPECT_EQ(output.scalar_type(), dtype);
        return model->seen;
      };
      EXPECT_EQ(seen({.param_dtype = dtype}), (std::vector{dtype, at::kLong}));
      EXPECT_EQ(seen({.param_dtype = dtype, .cast_forward_inputs = false}), (std::vector{at::kFloat, at::kLong}));
    }
    // Without a compute dtype there is nothing to convert to.
    const auto model = std::make_shared<Probe>();
    const auto sharded = fully_shard(*model, {.mesh = line(), .mixed_precision = MixedPrecisionPolicy{}});
    fsdp::forward(model, x.to(at::kDouble).to(at::kFloat), rows);
    EXPECT_EQ(model->seen, (std::vector{at::kFloat, at::kLong}));
  });
}

/// Each unit has its own policy.
TEST(PrecisionPolicy, CastForwardInputsOfOneUnit) {
  over_ranks([] {
    struct Pair : torch::nn::Module {
      Pair() : first(register_module("first", std::make_shared<Probe>())), second(register_module("second", std::make_shared<Probe>())) {}
      std::shared_ptr<Probe> first, second;
    };
    Pair model;
    const auto sharded = fully_shard(
        model, {.mesh = line(),
                .units = each<Probe>(),
                .mixed_precision = MixedPrecisionPolicy{.param_dtype = at::kBFloat16},
                .unit_settings = [](const std::string& name, const torch::nn::Module&) {
                  if (name != "second") return UnitSettings{};
                  return UnitSettings{.mixed_precision = MixedPrecisionPolicy{.param_dtype = at::kHalf, .cast_forward_inputs = false}};
                }});
    const auto x = normal({4, 6}, 3);
    const auto rows = at::tensor({1}, at::kLong);
    EXPECT_EQ(fsdp::forward(model.first, x, rows).scalar_type(), at::kBFloat16);
    EXPECT_EQ(fsdp::forward(model.second, x, rows).scalar_type(), at::kHalf);
    EXPECT_EQ(model.first->seen.front(), at::kBFloat16);
    EXPECT_EQ(model.second->seen.front(), at::kFloat);
  });
}

/// The mean over the ranks of what each computes with a copy of `main` in another dtype; as the library: a sum in fp32 of what autograd
/// gives in the compute dtype.
NamedTensors mean_gradients(const Net& main, at::ScalarType compute, int ranks, const std::function<at::Tensor(Net&, int rank)>& loss) {
  NamedTensors sums;
  for (int rank = 0; rank < ranks; ++rank) {
    const auto copy = make_net();
    copy->to(compute);
    {
      const torch::NoGradGuard no_grad;
      const auto from = main.parameters();
      auto to = copy->parameters();
      for (std::size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i]);
    }
    loss(*copy, rank).backward();
    std::size_t i = 0;
    for (const auto& item : copy->named_parameters()) {
      const auto gradient = item.value().grad().to(at::kFloat);
      if (rank == 0) {
        sums.emplace_back(item.key(), gradient.clone());
      } else {
        sums[i].second += gradient;
      }
      ++i;
    }
  }
  for (auto& [name, sum] : sums) sum /= ranks;
  return sums;
}

/// fp16 with loss scaling against the same by hand. Without a scale, these gradients vanish in fp16.
TEST(PrecisionPolicy, HalfWithLossScaling) {
  over_ranks([](int rank) {
    const auto mesh = line();
    const int ranks = static_cast<int>(mesh.size());
    constexpr double kScale = 16'384;
    constexpr double kLr = 1e6;
    const auto loss_of = [](Net& net, int of_rank) {
      return net.forward(batch(of_rank).to(net.first->weight.scalar_type())).to(at::kFloat).square().mean() * 1e-7;
    };
    for (const auto& strategy : all_strategies()) {
      const auto model = make_net();
      auto sharded = fully_shard(*model, {.mesh = mesh,
                                          .units = each_linear(),
                                          .placements = Placements::from_name(strategy),
                                          .mixed_precision = MixedPrecisionPolicy{.param_dtype = at::kHalf}});
      for (const auto& parameter : model->parameters()) EXPECT_EQ(parameter.scalar_type(), at::kHalf);
      SGD optimizer(*model, {.lr = kLr});
      GradScaler scaler({.init_scale = kScale});
      const auto plain = make_net();
      const auto initial = values_of(*make_net());
      for (int step = 0; step < 3; ++step) {
        auto expected = mean_gradients(*plain, at::kHalf, ranks, [&](Net& net, int of_rank) { return loss_of(net, of_rank) * kScale; });
        for (auto& [name, gradient] : expected) gradient /= kScale;
        scaler.scale(loss_of(*model, rank)).backward();
        scaler.unscale_(*model);
        const auto gradients = sharded.full_gradients();
        expect_same(gradients, expected, 0, strategy + ", step " + std::to_string(step));
        EXPECT_EQ(gradients[0].second.scalar_type(), at::kFloat);
        EXPECT_GT(gradients[0].second.count_nonzero().item<std::int64_t>(), 40);
        EXPECT_TRUE(scaler.step(optimizer));
        scaler.update();
        optimizer.zero_grad();
        const torch::NoGradGuard no_grad;
        std::size_t i = 0;
        for (auto& parameter : plain->parameters()) parameter.sub_(expected[i++].second, kLr);
        // One fused multiply-add more or less.
        expect_same(sharded.full_parameters(), values_of(*plain), 1e-6, strategy + ", step " + std::to_string(step));
      }
      EXPECT_FALSE(torch::allclose(sharded.full_parameters()[0].second, initial[0].second, 0, 1e-4)) << "it has not trained";
      loss_of(*model, rank).backward();
      EXPECT_EQ(sharded.full_gradients()[0].second.count_nonzero().item<std::int64_t>(), 0) << "the scale was needed";
    }
  });
}

/// A fixed point of 4 bits behind the point, in one byte.
at::Tensor fixed_point(const at::Tensor& value) { return value.to(at::kFloat).mul(16).round().clamp(-128, 127); }

std::shared_ptr<const GatherFormat> fixed_point_format() {
  GatherFormat format{.block = 4, .block_bytes = 4, .pre_all_gather = {}, .post_all_gather = {}};
  format.pre_all_gather = [](const at::Tensor& main, const at::Tensor& wire) {
    wire.view(at::kChar).copy_(fixed_point(main).to(at::kChar));
  };
  format.post_all_gather = [](const at::Tensor& wire, const at::Tensor& whole) {
    whole.copy_(wire.view(at::kChar).to(at::kFloat).div(16));
  };
  return std::make_shared<const GatherFormat>(std::move(format));
}

/// Weights travel in the format, biases do not. Forward computes with what arrives, gradients go to the unchanged main parameters.
TEST(PrecisionPolicy, AGatherFormatOfOnesOwn) {
  over_ranks([](int rank) {
    const auto mesh = line();
    const int ranks = static_cast<int>(mesh.size());
    const auto format = fixed_point_format();
    for (const auto& strategy : all_strategies()) {
      const auto model = make_net();
      auto sharded = fully_shard(*model, {.mesh = mesh,
                                          .units = each_linear(),
                                          .placements = Placements::from_name(strategy),
                                          .gather_format = [&](const std::string& name, const at::Tensor&) {
                                            return name.ends_with("weight") ? format : nullptr;
                                          }});
      SGD optimizer(*model, {.lr = 0.5});
      const auto main = make_net();
      expect_same(sharded.full_parameters(), values_of(*main), 0, strategy + ", at first");
      for (int step = 0; step < 3; ++step) {
        // What the parameters are when an operator sees them.
        const auto seen = make_net();
        {
          const torch::NoGradGuard no_grad;
          auto to = seen->named_parameters();
          for (const auto& item : main->named_parameters()) {
            to[item.key()].copy_(item.key().ends_with("weight") ? fixed_point(item.value()) / 16 : item.value());
          }
          EXPECT_FALSE(torch::equal(seen->first->weight, main->first->weight));
          for (const auto& item : model->named_parameters()) EXPECT_TRUE(torch::equal(item.value(), to[item.key()])) << item.key();
        }
        const auto expected =
            mean_gradients(*seen, at::kFloat, ranks, [](Net& net, int of) { return net.forward(batch(of)).square().mean(); });
        const auto loss = model->forward(batch(rank)).square().mean();
        EXPECT_EQ(loss.item<double>(), seen->forward(batch(rank)).square().mean().item<double>()) << strategy;
        loss.backward();
        const auto what = strategy + ", step " + std::to_string(step);
        expect_same(sharded.full_gradients(), expected, ranks == 1 ? 0 : 1e-6, what);
        optimizer.step();
        optimizer.zero_grad();
        const torch::NoGradGuard no_grad;
        std::size_t i = 0;
        for (auto& parameter : main->parameters()) parameter.sub_(expected[i++].second, 0.5);
        expect_same(sharded.full_parameters(), values_of(*main), 1e-6, what);
        // From here on the same bits, so that rounding does not decide what the next step sees.
        const auto now = sharded.full_parameters();
        i = 0;
        for (auto& parameter : main->parameters()) parameter.copy_(now[i++].second);
      }
    }
  });
}

/// Nothing stays gathered, and the next forward begins anew.
TEST(PrecisionPolicy, AGatherFormatThatThrows) {
  testing::run_ranks(2, [](int rank) {
    bool throws = false;
    auto format = std::make_shared<GatherFormat>(*fixed_point_format());
    format->pre_all_gather = [&throws, convert = format->pre_all_gather](const at::Tensor& main, const at::Tensor& wire) {
      if (std::exchange(throws, false)) throw std::runtime_error("no such number");
      convert(main, wire);
    };
    const auto model = make_net();
    const auto gather_format = [&](const std::string&, const at::Tensor&) { return format; };
    auto sharded = fully_shard(*model, {.units = each_linear(), .gather_format = gather_format});
    const auto expected = model->forward(batch(rank));
    sharded.reset();
    for (auto* layer : {&*model->first, &*model->second}) handle(*layer).reshard();
    throws = true;
    EXPECT_EQ(testing::message_of<std::exception>([&] { model->forward(batch(rank)); }), "no such number");
    EXPECT_EQ(sharded.memory_stats().gathered_parameters.live, 0);
    EXPECT_EQ(sharded.memory_stats().communication.live, 0);
    EXPECT_TRUE(torch::equal(model->forward(batch(rank)), expected));
  });
}

/// A quarter of fp32's bytes, for what travels in the format.
TEST(PrecisionPolicy, AGatherFormatsBytesAreWhatTravels) {
  testing::run_ranks(2, [] {
    const auto format = fixed_point_format();
    const auto sent = [&](bool formatted) {
      torch::nn::Linear model(torch::nn::LinearOptions(64, 64).bias(false));
      auto sharded = fully_shard(
          *model, {.mesh = line(), .gather_format = [&](const std::string&, const at::Tensor&) { return formatted ? format : nullptr; }});
      sharded.reset_wire_stats();
      sharded.unshard();
      return sharded.wire_stats().all_gather_bytes;
    };
    EXPECT_EQ(sent(false), 64 * 64 * 4 / 2);
    EXPECT_EQ(sent(true), 64 * 64 / 2);
  });
}

/// Operators of several kinds, whose inputs must have the dtype of their parameters.
struct Several : torch::nn::Module {
  Several()
      : linear(register_module("linear", torch::nn::Linear(4, 4))),
        conv(register_module("conv", torch::nn::Conv1d(torch::nn::Conv1dOptions(4, 4, 1)))),
        matrix(register_parameter("matrix", at::ones({4, 4}))) {}
  at::Tensor forward(const at::Tensor& x) { return linear(x); }
  torch::nn::Linear linear;
  torch::nn::Conv1d conv;
  at::Tensor matrix;
};

// C++ modules have no hooks that could convert inputs: the operator that fails for it says what does.
TEST(MixedPrecision, InputsOfAnotherDtypeAreExplained) {
  over_ranks([] {
    const auto model = std::make_shared<Several>();
    (void)fully_shard(*model, {.mesh = line(),
                               .units = [](const std::string& name, const torch::nn::Module&) { return name == "linear"; },
                               .mixed_precision = MixedPrecisionPolicy{.param_dtype = at::kBFloat16}});
    const auto expect = [](const std::function<void()>& fn, const std::string& unit) {
      const auto message = testing::message_of<std::exception>(fn);
      EXPECT_TRUE(testing::has(message, "parameters of unit '" + unit + "'")) << message;
      for (const auto* text : {"BFloat16", "MixedPrecisionPolicy::param_dtype", "fsdp::forward", "cast_forward_inputs"}) {
        EXPECT_TRUE(testing::has(message, text)) << message;
      }
    };
    const auto x = at::ones({3, 4, 4});
    expect([&] { model->forward(x); }, "linear");
    expect([&] { model->conv(x); }, "(root)");
    expect([&] { (void)x[0].matmul(model->matrix); }, "(root)");
    expect([&] { (void)at::mm(x[0], model->matrix.t()); }, "(root)");
    EXPECT_EQ(forward(model->linear, x).scalar_type(), at::kBFloat16);
    // What fails for another reason is not explained.
    const auto shape = testing::message_of<std::exception>([&] { (void)model->linear(at::ones({3, 5}, at::kBFloat16)); });
    EXPECT_FALSE(testing::has(shape, "fsdp::forward")) << shape;
  });
  testing::run_ranks(1, [] {
    const auto model = std::make_shared<Several>();
    (void)fully_shard(*model, {.mesh = line()});
    const auto own = testing::message_of<std::exception>([&] { model->forward(at::ones({3, 4}, at::kBFloat16)); });
    EXPECT_FALSE(testing::has(own, "fsdp::forward")) << own;
  });
}

}  // namespace precision_policy_test
}  // namespace fsdp
