#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/fsdp.h"
#include "support/same_bits.h"

// The same model, sharded over ranks and whole in one process. Nothing of the reference goes through the library.
namespace fsdp::testing {

/// What a few steps of training leave.
struct Trace {
  std::vector<double> losses;
  NamedTensors gradients;   ///< Of the last step.
  NamedTensors parameters;  ///< After the last step.
};

/// A model to train: how to make it, and the loss on the sequences [begin, end) of the global batch of `step`.
struct Task {
  std::function<std::shared_ptr<torch::nn::Module>()> make;
  std::function<at::Tensor(torch::nn::Module& model, int step, std::int64_t begin, std::int64_t end)> loss;
  UnitPredicate units;
  std::int64_t batch = 4;
  int steps = 3;
};

inline const std::vector<std::string>& all_strategies() {
  static const std::vector<std::string> names = {"no_shard", "optim", "optim_grads", "optim_grads_params"};
  return names;
}

/// ATen's fused AdamW, as torch's optimizers call it, on whole parameters.
class WholeAdamW {
 public:
  explicit WholeAdamW(std::vector<at::Tensor> parameters) : parameters_(std::move(parameters)) {
    for (const auto& parameter : parameters_) {
      states_.push_back({at::zeros_like(parameter), at::zeros_like(parameter), at::zeros({}, at::kFloat)});
    }
  }

  void step() {
    const torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      if (!parameters_[i].grad().defined()) continue;
      states_[i][2] += 1;
      at::_fused_adamw_({parameters_[i]}, {parameters_[i].grad()}, {states_[i][0]}, {states_[i][1]}, {}, {states_[i][2]}, 1e-2, 0.9, 0.999,
                        1e-2, 1e-8, false, false);
    }
  }

  void zero_grad() {
    for (auto& parameter : parameters_) parameter.mutable_grad() = at::Tensor();
  }

 private:
  std::vector<at::Tensor> parameters_;
  std::vector<std::vector<at::Tensor>> states_;
};

/// Plain LibTorch: the mean over `parts` equal parts of the batch.
inline Trace train_whole(const Task& task, int parts) {
  torch::manual_seed(7);
  const auto model = task.make();
  WholeAdamW optimizer(model->parameters());
  Trace trace;
  for (int step = 0; step < task.steps; ++step) {
    optimizer.zero_grad();
    at::Tensor loss;
    const std::int64_t share = task.batch / parts;
    for (int part = 0; part < parts; ++part) {
      const auto term = task.loss(*model, step, part * share, (part + 1) * share) / parts;
      loss = loss.defined() ? loss + term : term;
    }
    loss.backward();
    trace.losses.push_back(loss.item<double>());
    trace.gradients.clear();
    for (const auto& item : model->named_parameters()) {
      trace.gradients.emplace_back(item.key(), item.value().grad().defined() ? item.value().grad().clone() : at::Tensor());
    }
    optimizer.step();
  }
  for (const auto& item : model->named_parameters()) trace.parameters.emplace_back(item.key(), item.value().detach().clone());
  return trace;
}

/// Sharded, this rank's part of the same batch.
inline Trace train_sharded(const Task& task, FullyShardOptions options) {
  torch::manual_seed(7);
  const auto model = task.make();
  const auto mesh = options.mesh;
  options.units = task.units;
  auto sharded = fully_shard(*model, std::move(options));
  AdamW optimizer(*model, {.lr = 1e-2});
  Trace trace;
  const std::int64_t share = task.batch / mesh.size();
  for (int step = 0; step < task.steps; ++step) {
    optimizer.zero_grad();
    const auto loss = task.loss(*model, step, mesh.rank() * share, (mesh.rank() + 1) * share);
    loss.backward();
    trace.losses.push_back(loss.item<double>());
    trace.gradients = sharded.full_gradients();
    optimizer.step();
  }
  trace.parameters = sharded.full_parameters();
  return trace;
}

/// Names, presence and values agree: exactly if `tolerance` is 0, else to rtol = atol = tolerance.
inline void expect_same(const NamedTensors& actual, const NamedTensors& expected, double tolerance, const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    ASSERT_EQ(actual[i].first, expected[i].first) << what;
    const auto& [name, value] = actual[i];
    const auto& reference = expected[i].second;
    ASSERT_EQ(value.defined(), reference.defined()) << what << ": " << name;
    if (!value.defined()) continue;
    if (tolerance == 0) {
      EXPECT_TRUE(torch::equal(value, reference))
          << what << ": " << name << " differs by up to " << (value - reference).abs().max().item<double>();
    } else {
      EXPECT_TRUE(torch::allclose(value, reference, tolerance, tolerance))
          << what << ": " << name << " differs by up to " << (value - reference).abs().max().item<double>();
    }
  }
}

/// Trains the task with every strategy on `ranks` ranks (called in each of them): bit-identical to the whole model on 1 rank, to rounding
/// of the batch split on more, and bit-identical between strategies.
inline void expect_parity(const Task& task, int ranks) {
  const auto mesh = init_device_mesh("cpu", {{"dp_shard", -1}});
  const auto reference = train_whole(task, ranks);
  const double tolerance = ranks == 1 ? 0 : 1e-5;
  Trace first;
  for (const auto& strategy : all_strategies()) {
    const auto trace = train_sharded(task, {.mesh = mesh, .placements = Placements::from_name(strategy)});
    expect_same(trace.gradients, reference.gradients, tolerance, strategy + " gradients");
    // One Adam step moves a weight by about lr whatever the size of its gradient, so rounding in tiny gradients shows at that scale.
    expect_same(trace.parameters, reference.parameters, ranks == 1 ? 0 : 2e-3, strategy + " parameters");
    if (first.losses.empty()) {
      first = trace;
      continue;
    }
    EXPECT_EQ(trace.losses, first.losses) << strategy;
    expect_same(trace.gradients, first.gradients, 0, strategy + " against " + all_strategies().front() + ", gradients");
    expect_same(trace.parameters, first.parameters, 0, strategy + " against " + all_strategies().front() + ", parameters");
  }
}

}  // namespace fsdp::testing
