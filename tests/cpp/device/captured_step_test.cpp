#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/fsdp.h"
#include "support/device_mesh.h"
#include "support/messages.h"
#include "support/same_bits.h"
#include "support/stack.h"

// fsdp::capture: what is replayed has the bits of steps that are not.
namespace captured_step_test {

using fsdp::DeviceMesh;
using fsdp::testing::device_mesh;
using fsdp::testing::expect_same_bits;
using fsdp::testing::message_of;
using fsdp::testing::NamedTensors;
using fsdp::testing::run_ranks_on_device;
using fsdp::testing::Stack;

#if __has_include(<ATen/core/GraphImplInterface.h>)
constexpr bool kTorchHasGraphs = true;
#else
constexpr bool kTorchHasGraphs = false;
#endif

struct Case {
  std::string strategy = "optim_grads_params";
  bool bf16 = false;
  bool sgd = false;
  bool clipped = false;
  int microbatches = 1;
  fsdp::Offload offload = fsdp::Offload::kNone;
  bool report_nan = false;
  bool one_unit = false;
  bool rounded = false;  ///< Gradients in 4 bits, at random, with error feedback.

  std::string name() const {
    return strategy + (bf16 ? ", bf16" : ", fp32") + (sgd ? ", SGD" : ", AdamW") + (clipped ? ", clipped" : "") +
           (microbatches > 1 ? ", microbatches" : "") + (one_unit ? ", one unit" : "") + (rounded ? ", rounded" : "");
  }
};

constexpr int kWarmUp = 3;
constexpr int kReplays = 2;

class Trainee {
 public:
  Trainee(const Case& c, const DeviceMesh& mesh) : case_(c), mesh_(mesh), model_(fsdp::testing::make_stack()) {
    model_->to(mesh.device());
    fsdp::FullyShardOptions options{.mesh = mesh,
                                    .units = c.one_unit ? fsdp::UnitPredicate() : fsdp::testing::stack_units(),
                                    .placements = fsdp::Placements::from_name(c.strategy),
                                    .offload = c.offload,
                                    .report_nan_in_param_grad = c.report_nan};
    if (c.rounded) {
      options.grad_comm_format =
          fsdp::GradCommFormat{.bits = 4, .block = 32, .hadamard = true, .stochastic_rounding = true, .error_feedback = true};
    }
    if (c.bf16) options.mixed_precision = fsdp::MixedPrecisionPolicy{.param_dtype = at::kBFloat16};
    handle_.emplace(fsdp::fully_shard(*model_, options));
    if (c.sgd) {
      optimizer_ = std::make_unique<fsdp::SGD>(*model_, fsdp::SGDOptions{.lr = 0.05, .momentum = 0.9});
    } else {
      optimizer_ = std::make_unique<fsdp::AdamW>(*model_, fsdp::AdamWOptions{.lr = 1e-2});
    }
    const auto like = at::device(mesh.device());
    for (int k = 0; k < c.microbatches; ++k) inputs_.push_back(at::zeros({4, 3}, like.dtype(c.bf16 ? at::kBFloat16 : at::kFloat)));
    loss = at::zeros({}, like);
    norm = at::zeros({}, like.dtype(at::kDouble));
  }

  void set_input(int step) {
    for (int k = 0; k < case_.microbatches; ++k) {
      inputs_[static_cast<std::size_t>(k)].copy_(fsdp::testing::stack_input(10 * step + k, mesh_.rank()));
    }
  }

  void step() {
    loss.zero_();
    for (int k = 0; k < case_.microbatches; ++k) {
      handle_->set_requires_gradient_sync(k + 1 == case_.microbatches);
      auto of_one = model_->forward(inputs_[static_cast<std::size_t>(k)]).to(at::kFloat).square().mean();
      of_one.backward();
      loss.add_(of_one.detach());
    }
    if (case_.clipped) norm.copy_(fsdp::clip_grad_norm_(*model_, 0.1));
    optimizer_->step();
    optimizer_->zero_grad();
  }

  /// Other parameters have gradients, so the optimizer begins with what it has counted.
  void step_of_some_blocks() {
    model_->forward(inputs_[0], {0, 2}).to(at::kFloat).square().mean().backward();
    optimizer_->step();
    optimizer_->zero_grad();
  }

  double evaluate() {
    const torch::NoGradGuard no_grad;
    set_input(100);
    return model_->forward(inputs_[0]).to(at::kFloat).square().mean().item<double>();
  }
  NamedTensors parameters() const {
    NamedTensors all;
    for (const auto& [name, value] : handle_->full_parameters()) all.emplace_back(name, value.cpu());
    return all;
  }

  Stack& model() { return model_; }
  fsdp::FSDPModule& handle() { return *handle_; }
  fsdp::Optimizer& optimizer() { return *optimizer_; }
  at::Tensor loss, norm;

 private:
  const Case case_;
  const DeviceMesh mesh_;
  Stack model_;
  std::optional<fsdp::FSDPModule> handle_;
  std::unique_ptr<fsdp::Optimizer> optimizer_;
  std::vector<at::Tensor> inputs_;
};

/// What a run has: the losses and norms of the steps behind the warm-up, evaluations, one more step without a graph, parameters.
struct Outcome {
  std::vector<double> values;
  NamedTensors parameters;
};

Outcome finish(Trainee& trainee, std::vector<double> values) {
  values.push_back(trainee.evaluate());
  trainee.set_input(50);
  trainee.step();
  values.push_back(trainee.loss.item<double>());
  trainee.step_of_some_blocks();
  return {.values = std::move(values), .parameters = trainee.parameters()};
}

Outcome eager(const Case& c, const DeviceMesh& mesh) {
  Trainee trainee(c, mesh);
  std::vector<double> values;
  trainee.set_input(0);
  for (int step = 0; step < kWarmUp; ++step) trainee.step();
  for (int step = 0; step < kReplays; ++step) {
    trainee.set_input(step + 1);
    trainee.step();
    values.push_back(trainee.loss.item<double>());
    values.push_back(trainee.norm.item<double>());
    values.push_back(trainee.evaluate());  // It may leave copies of parameters.
  }
  return finish(trainee, std::move(values));
}

Outcome replayed(const Case& c, const DeviceMesh& mesh) {
  Trainee trainee(c, mesh);
  std::vector<double> values;
  trainee.set_input(0);
  auto captured = fsdp::capture(*trainee.model(), [&] { trainee.step(); }, {.warm_up = kWarmUp});
  for (int step = 0; step < kReplays; ++step) {
    trainee.set_input(step + 1);
    sim::reset_stats(mesh.device().index());
    captured.replay();
    EXPECT_TRUE(sim::stats(mesh.device().index()).host_waits.empty());
    values.push_back(trainee.loss.item<double>());
    values.push_back(trainee.norm.item<double>());
    values.push_back(trainee.evaluate());  // It may leave copies of parameters.
  }
  return finish(trainee, std::move(values));
}

void expect_equal_runs(const std::vector<Case>& cases, const DeviceMesh& mesh) {
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name());
    const auto expected = eager(c, mesh);
    sim::expect_no_reports();
    const auto found = replayed(c, mesh);
    EXPECT_EQ(found.values, expected.values);
    expect_same_bits(found.parameters, expected.parameters);
    sim::expect_no_reports();
  }
}

TEST(CapturedStep, TrainsAsWithoutAGraph) {
  if (!kTorchHasGraphs) GTEST_SKIP() << "torch has no graphs of any device";
  run_ranks_on_device(2, [] {
    const std::vector<Case> cases = {{.strategy = "no_shard", .bf16 = true},
                                     {.strategy = "optim", .microbatches = 2},
                                     {.strategy = "optim_grads", .sgd = true},
                                     {.clipped = true},
                                     {.one_unit = true},
                                     {.bf16 = true, .sgd = true, .clipped = true},
                                     {.rounded = true},
                                     {.bf16 = true, .microbatches = 2, .rounded = true}};
    expect_equal_runs(cases, device_mesh({{"dp_shard", -1}}));
  });
}

TEST(CapturedStep, TrainsInTwoDimensionsAndAlone) {
  if (!kTorchHasGraphs) GTEST_SKIP() << "torch has no graphs of any device";
  run_ranks_on_device(4, [] { expect_equal_runs({{.clipped = true}}, device_mesh({{"dp_outer", 2}, {"dp_shard", -1}})); });
  run_ranks_on_device(1, [] { expect_equal_runs({{.bf16 = true, .clipped = true}}, device_mesh({{"dp_shard", -1}})); });
}

TEST(CapturedStep, ClipsWithoutAWaitAsWithOne) {
  run_ranks_on_device(2, [] {
    const auto mesh = device_mesh({{"dp_shard", -1}});
    for (const double p : {1.0, 2.0, 3.0, std::numeric_limits<double>::infinity()}) {
      for (const double max_norm : {0.05, 1e6}) {
        std::vector<NamedTensors> gradients;
        std::vector<double> norms;
        for (const bool waits : {true, false}) {
          Trainee trainee({}, mesh);
          trainee.set_input(1);
          trainee.model()->forward(fsdp::testing::stack_input(1, mesh.rank()).to(mesh.device())).square().mean().backward();
          trainee.handle().finish_gradient_sync();
          sim::reset_stats(mesh.device().index());
          if (waits) {
            norms.push_back(fsdp::clip_grad_norm(*trainee.model(), max_norm, {.norm_type = p}));
          } else {
            const auto norm = fsdp::clip_grad_norm_(*trainee.model(), max_norm, {.norm_type = p});
            EXPECT_TRUE(sim::stats(mesh.device().index()).host_waits.empty());
            norms.push_back(norm.item<double>());
          }
          gradients.emplace_back();
          for (const auto& [name, value] : trainee.handle().full_gradients()) gradients.back().emplace_back(name, value.cpu());
        }
        EXPECT_DOUBLE_EQ(norms[0], norms[1]) << p;
        for (std::size_t k = 0; k < gradients[0].size(); ++k) {
          EXPECT_TRUE(at::allclose(gradients[0][k].second, gradients[1][k].second, 1e-6, 0)) << gradients[0][k].first;
        }
      }
    }
  });
}

/// Where units' parameters lie as they are computed with, step by step.
TEST(CapturedStep, AddressesStayBehindTheThirdStep) {
  run_ranks_on_device(2, [] {
    const auto mesh = device_mesh({{"dp_shard", -1}});
    for (const char* const strategy : {"optim_grads", "optim_grads_params"}) {
      for (const bool bf16 : {false, true}) {
        SCOPED_TRACE(std::string(strategy) + (bf16 ? ", bf16" : ", fp32"));
        Trainee trainee({.strategy = strategy, .bf16 = bf16}, mesh);
        std::vector<std::vector<const void*>> of_steps;
        trainee.model()->observer = [&](const std::string& event) {
          if (!event.starts_with("forward")) return;
          const auto& block = trainee.model()->blocks->at<fsdp::testing::StackBlockImpl>(static_cast<std::size_t>(event.back() - '0'));
          at::sum(block.up->weight);  // it is there from now on
          of_steps.back().push_back(block.up->weight.const_data_ptr());
        };
        for (int step = 0; step < 6; ++step) {
          of_steps.emplace_back();
          trainee.set_input(step);
          trainee.step();
        }
        EXPECT_EQ(of_steps[3].size(), 4U);
        for (std::size_t step = 4; step < of_steps.size(); ++step) EXPECT_EQ(of_steps[step], of_steps[3]) << step;
      }
    }
  });
}

void expect_says(const std::string& message, const std::string& text) {
  EXPECT_NE(message.find(text), std::string::npos) << message << "\n  does not say: " << text;
}

TEST(CapturedStep, RefusesWhatWaitsForValues) {
  if (!kTorchHasGraphs) GTEST_SKIP() << "torch has no graphs of any device";
  run_ranks_on_device(2, [] {
    const auto mesh = device_mesh({{"dp_shard", -1}});
    const auto refused = [&](const Case& c, const std::function<void(Trainee&)>& step) {
      Trainee trainee(c, mesh);
      trainee.set_input(0);
      int calls = 0;
      const auto error = message_of([&] {
        fsdp::capture(*trainee.model(), [&] {
          trainee.loss.copy_(trainee.model()->forward(at::ones({4, 3}, mesh.device())).square().mean().detach());
          trainee.model()->forward(at::ones({4, 3}, mesh.device())).square().mean().backward();
          if (++calls > kWarmUp) step(trainee);
          trainee.optimizer().zero_grad();
        });
      });
      sim::expect_no_reports();
      trainee.step();  // goes on without a graph
      sim::expect_no_reports();
      return error;
    };
    fsdp::GradScaler scaler;
    expect_says(refused({}, [](Trainee& t) { fsdp::clip_grad_norm(*t.model(), 1); }), "clip_grad_norm in a step that is captured");
    expect_says(refused({}, [](Trainee& t) { fsdp::clip_grad_norm_(*t.model(), 1, {.error_if_nonfinite = true}); }),
                "clip_grad_norm_ in a step that is captured");
    expect_says(refused({}, [&](Trainee& t) { scaler.unscale_(*t.model()); }), "GradScaler in a step that is captured");
    expect_says(refused({},
                        [](Trainee& t) {
                          auto adam = fsdp::wrap(*t.model(), [](auto shards) {
                            return std::make_unique<torch::optim::Adam>(shards, torch::optim::AdamOptions(0.01));
                          });
                          adam.step();
                        }),
                "an optimizer's step in a step that is captured");
    expect_says(refused({.report_nan = true}, [](Trainee&) {}), "report_nan_in_param_grad in a step that is captured");
    expect_says(refused({.offload = fsdp::Offload::kAll}, [](Trainee&) {}), "is offloaded");
  });
}

TEST(CapturedStep, IsRefusedBeforeItBegins) {
  run_ranks_on_device(2, [](int rank) {
    const auto cpu = fsdp::init_device_mesh("cpu", {{"dp_shard", -1}});
    Trainee on_cpu({}, cpu);
    expect_says(message_of([&] { fsdp::capture(*on_cpu.model(), [] {}); }), "this build knows no graphs of 'cpu' devices");
    if (!kTorchHasGraphs) return;
    const auto mesh = device_mesh({{"dp_shard", -1}});
    Trainee trainee({}, mesh);
    const auto step = [&] { trainee.step(); };
    expect_says(message_of([&] { fsdp::capture(*trainee.model(), step, {.warm_up = 0}); }), "warm_up is 0");
    expect_says(message_of([&] { fsdp::capture(*trainee.model(), step, {.warm_up = 1 + rank}); }), "has 'warm_up 1'");
  });
}

TEST(CapturedStep, IsNotReplayedWithOtherSettings) {
  if (!kTorchHasGraphs) GTEST_SKIP() << "torch has no graphs of any device";
  run_ranks_on_device(2, [] {
    const auto mesh = device_mesh({{"dp_shard", -1}});
    std::optional<Trainee> trainee(std::in_place, Case{}, mesh);
    trainee->set_input(0);
    auto captured = fsdp::capture(*trainee->model(), [&] { trainee->step(); });
    const auto before = trainee->parameters();
    trainee->optimizer().set_lr_factor(0.5);
    expect_says(message_of([&] { captured.replay(); }), "a learning rate is 0.005, but the step was captured with 0.01");
    expect_same_bits(trainee->parameters(), before);
    trainee->optimizer().set_lr_factor(1);
    captured.replay();
    trainee.reset();
    expect_says(message_of([&] { captured.replay(); }), "the optimizer that was captured no longer exists");
  });
}

}  // namespace captured_step_test
