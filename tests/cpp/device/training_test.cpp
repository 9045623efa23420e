#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <map>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/fsdp.h"
#include "support/device_mesh.h"
#include "support/same_bits.h"
#include "support/stack.h"

// Training with the library on the device: the bits of a CPU mesh, nothing to report, and no waits of the host.
namespace training_test {

using fsdp::DeviceMesh;
using fsdp::MeshDim;
using fsdp::Offload;
using fsdp::Placements;
using fsdp::testing::device_mesh;
using fsdp::testing::expect_same_bits;
using fsdp::testing::NamedTensors;
using fsdp::testing::run_ranks_on_device;
using fsdp::testing::side_stream;
using fsdp::testing::Stack;
using fsdp::testing::stack_units;

const std::vector<std::string> kStrategies = {"no_shard", "optim", "optim_grads", "optim_grads_params"};

struct Case {
  std::string strategy = "optim_grads_params";
  bool hfsdp = false;
  bool bf16 = false;
  Offload offload = Offload::kNone;
  bool checkpoint = false;
  int microbatches = 1;  ///< All but the last without reductions.
  std::optional<double> max_norm = {};
  bool scaled = false;  ///< By a GradScaler.
  bool moves = false;   ///< Every second step is on another stream.
  std::optional<fsdp::GradCommFormat> grad_comm = {};
  std::string fails_at = {};  ///< In the second step, the observer of the model throws at this event; the step is then made again.

  std::string name() const {
    return strategy + (hfsdp ? ", HFSDP" : "") + (bf16 ? ", bf16" : ", fp32") + (offload != Offload::kNone ? ", offload" : "") +
           (checkpoint ? ", checkpoint" : "") + (microbatches > 1 ? ", microbatches" : "") + (max_norm ? ", clipped" : "") +
           (scaled ? ", scaled" : "") + (moves ? ", moves" : "") + (grad_comm ? ", rounded" : "") + fails_at;
  }
};

struct Outcome {
  std::vector<double> losses;
  NamedTensors parameters;
  std::map<std::string, std::int64_t> host_waits;  ///< In forward, backward, and update of the last step.
};

class Trainee {
 public:
  Trainee(const Case& c, const DeviceMesh& mesh) : case_(c), mesh_(mesh), model_(fsdp::testing::make_stack({.checkpoint = c.checkpoint})) {
    model_->to(mesh.device());
    fsdp::FullyShardOptions options{
        .mesh = mesh, .units = stack_units(), .placements = Placements::from_name(c.strategy), .offload = c.offload};
    if (c.hfsdp) options.outer_placements = Placements::optim();
    options.grad_comm_format = c.grad_comm;
    if (c.bf16) options.mixed_precision = fsdp::MixedPrecisionPolicy{.param_dtype = at::kBFloat16};
    handle_.emplace(fsdp::fully_shard(*model_, options));
    optimizer_.emplace(*model_, fsdp::AdamWOptions{.lr = 1e-2});
  }

  Outcome train(int steps = 4) {
    Outcome outcome;
    for (int step = 0; step < steps; ++step) {
      if (!case_.fails_at.empty() && step == 1) fail(step);
      const auto on_stream = [&] { outcome.losses.push_back(train_step(step, outcome)); };
      if (case_.moves && step % 2 == 1 && !mesh_.device().is_cpu()) {
        const c10::StreamGuard other(side_stream(mesh_.device().index()));
        on_stream();
      } else {
        on_stream();
      }
    }
    for (const auto& [name, value] : handle_->full_parameters()) outcome.parameters.emplace_back(name, value.cpu());
    return outcome;
  }

  Stack& model() { return model_; }
  fsdp::AdamW& optimizer() { return *optimizer_; }

 private:
  at::Tensor input(int step, int microbatch) const {
    const auto x = fsdp::testing::stack_input(10 * step + microbatch, mesh_.rank()).to(mesh_.device());
    return case_.bf16 ? x.to(at::kBFloat16) : x;
  }
  static at::Tensor loss_of(const at::Tensor& y) { return y.to(at::kFloat).square().mean(); }

  void fail(int step) {
    model_->observer = [this](const std::string& event) {
      if (event == case_.fails_at) throw std::runtime_error("planned failure");
    };
    EXPECT_THROW(loss_of(model_->forward(input(step, 0))).backward(), std::exception);
    model_->observer = nullptr;
    handle_->reset();
  }

  double train_step(int step, Outcome& outcome) {
    std::vector<at::Tensor> inputs;
    for (int k = 0; k < case_.microbatches; ++k) inputs.push_back(input(step, k));
    if (!mesh_.device().is_cpu()) sim::reset_stats(mesh_.device().index());
    at::Tensor sum;
    for (int k = 0; k < case_.microbatches; ++k) {
      handle_->set_requires_gradient_sync(k + 1 == case_.microbatches);
      auto loss = loss_of(model_->forward(inputs[static_cast<std::size_t>(k)]));
      sum = sum.defined() ? sum + loss.detach() : loss.detach();
      (case_.scaled ? scaler_.scale(loss) : loss).backward();
    }
    if (case_.scaled) scaler_.unscale_(*model_);
    if (case_.max_norm) fsdp::clip_grad_norm(*model_, *case_.max_norm);
    if (case_.scaled) {
      scaler_.step(*optimizer_);
      scaler_.update();
    } else {
      optimizer_->step();
    }
    optimizer_->zero_grad();
    if (!mesh_.device().is_cpu()) outcome.host_waits = sim::stats(mesh_.device().index()).host_waits;
    return sum.item<double>();
  }

  const Case case_;
  const DeviceMesh mesh_;
  Stack model_;
  std::optional<fsdp::FSDPModule> handle_;
  std::optional<fsdp::AdamW> optimizer_;
  fsdp::GradScaler scaler_{{.init_scale = 1024}};
};

std::vector<MeshDim> dims(bool two) {
  return two ? std::vector<MeshDim>{{"dp_outer", 2}, {"dp_shard", -1}} : std::vector<MeshDim>{{"dp_shard", -1}};
}

/// Each case on the device as on the CPU. The first one of each precision stands for the CPU's bits of all, as strategies have the same.
void expect_the_cpus_bits(const std::vector<Case>& cases, bool two_dimensions,
                          const std::function<void(const Case&, const Outcome&)>& check = {}, bool shared_memory = true) {
  const auto cpu = fsdp::init_device_mesh("cpu", dims(two_dimensions), {.shared_memory = shared_memory});
  const auto mesh = device_mesh(dims(two_dimensions));
  std::map<bool, Outcome> expected;
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name());
    if (expected.find(c.bf16) == expected.end()) expected[c.bf16] = Trainee(c, cpu).train();
    const auto outcome = Trainee(c, mesh).train();
    EXPECT_EQ(outcome.losses, expected[c.bf16].losses);
    expect_same_bits(outcome.parameters, expected[c.bf16].parameters);
    if (check) check(c, outcome);
    sim::expect_no_reports();
  }
}

void expect_no_host_waits(const Case& c, const Outcome& outcome) {
  if (c.offload == Offload::kNone) {
    EXPECT_TRUE(outcome.host_waits.empty()) << ::testing::PrintToString(outcome.host_waits);
  }
}

/// For a norm, or for whether gradients are finite.
void expect_one_host_wait(const Case& c, const Outcome& outcome) {
  const auto& waits = outcome.host_waits;
  const auto sum = std::accumulate(waits.begin(), waits.end(), std::int64_t{0}, [](auto all, const auto& one) { return all + one.second; });
  EXPECT_EQ(sum, (c.max_norm ? 1 : 0) + (c.scaled ? 1 : 0)) << ::testing::PrintToString(waits);
}

std::vector<Case> every_strategy() {
  std::vector<Case> cases;
  for (const auto& strategy : kStrategies) {
    for (const bool bf16 : {false, true}) {
      for (const auto offload : {Offload::kNone, Offload::kAll}) cases.push_back({.strategy = strategy, .bf16 = bf16, .offload = offload});
    }
  }
  return cases;
}

TEST(DeviceTraining, WithEveryStrategyOnOneRank) {
  run_ranks_on_device(1, [] { expect_the_cpus_bits(every_strategy(), false, expect_no_host_waits); });
}
TEST(DeviceTraining, WithEveryStrategyOnTwoRanks) {
  run_ranks_on_device(2, [] { expect_the_cpus_bits(every_strategy(), false, expect_no_host_waits); });
}
TEST(DeviceTraining, WithEveryStrategyOnThreeRanks) {
  run_ranks_on_device(3, [] { expect_the_cpus_bits(every_strategy(), false, expect_no_host_waits); });
}
TEST(DeviceTraining, WithEveryStrategyOnFourRanks) {
  run_ranks_on_device(4, [] { expect_the_cpus_bits(every_strategy(), false, expect_no_host_waits); });
}

TEST(DeviceTraining, InTwoDimensions) {
  run_ranks_on_device(4, [] {
    std::vector<Case> cases;
    for (const bool bf16 : {false, true}) {
      for (const bool hfsdp : {false, true}) cases.push_back({.hfsdp = hfsdp, .bf16 = bf16});
      cases.push_back({.strategy = "no_shard", .bf16 = bf16});
    }
    expect_the_cpus_bits(cases, true, expect_no_host_waits);
  });
}

TEST(DeviceTraining, OnStreamsThatChange) {
  run_ranks_on_device(2, [] {
    std::vector<Case> cases;
    for (const auto& strategy : kStrategies) cases.push_back({.strategy = strategy, .moves = true});
    cases.push_back({.bf16 = true, .offload = Offload::kAll, .moves = true});
    expect_the_cpus_bits(cases, false, expect_no_host_waits);
  });
}

TEST(DeviceTraining, WithCheckpointedActivations) {
  run_ranks_on_device(2, [] {
    expect_the_cpus_bits({{.checkpoint = true}, {.bf16 = true, .checkpoint = true}}, false, expect_no_host_waits);
  });
}

TEST(DeviceTraining, WithMicrobatches) {
  run_ranks_on_device(2, [] {
    for (const auto& strategy : kStrategies) {
      expect_the_cpus_bits({{.strategy = strategy, .microbatches = 3}, {.strategy = strategy, .bf16 = true, .microbatches = 3}}, false,
                           expect_no_host_waits);
    }
  });
}

TEST(DeviceTraining, WithClippedGradients) {
  run_ranks_on_device(2, [] {
    for (const auto& strategy : kStrategies) expect_the_cpus_bits({{.strategy = strategy, .max_norm = 0.1}}, false, expect_one_host_wait);
  });
}

TEST(DeviceTraining, WithScaledLosses) {
  run_ranks_on_device(2, [] {
    expect_the_cpus_bits({{.scaled = true}, {.bf16 = true, .max_norm = 0.1, .scaled = true}}, false, expect_one_host_wait);
  });
}

// Ranks of a device round what they send each other, and so do CPUs that share no memory. With two dimensions, both reduce.
TEST(DeviceTraining, WithRoundedGradients) {
  const fsdp::GradCommFormat four{.bits = 4, .block = 64, .hadamard = true, .stochastic_rounding = true, .error_feedback = true};
  run_ranks_on_device(4, [&] {
    for (const bool two : {false, true}) {
      for (const int microbatches : {1, 2}) {
        expect_the_cpus_bits(
            {{.microbatches = microbatches, .grad_comm = four}, {.bf16 = true, .microbatches = microbatches, .grad_comm = four}}, two,
            expect_no_host_waits, /*shared_memory=*/false);
      }
    }
  });
}

TEST(DeviceTraining, AfterExceptions) {
  run_ranks_on_device(2, [] {
    for (const char* const event : {"forward blocks.2", "backward blocks.1"}) {
      for (const auto offload : {Offload::kNone, Offload::kAll}) {
        expect_the_cpus_bits({{.offload = offload, .fails_at = event}, {.bf16 = true, .offload = offload, .fails_at = event}}, false);
      }
    }
  });
}

}  // namespace training_test
