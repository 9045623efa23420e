#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "support/random_case.h"
#include "support/random_model.h"
#include "support/same_bits.h"

// The steps of a random case, for whoever computes them: sharded over ranks (sharded_trainee.h) or as plain replicas (replicas.h).
namespace fsdp::testing {

enum class Outcome : std::uint8_t { kCompleted, kFailedForward, kFailedBackward };

/// What a training leaves, as one rank sees it.
struct RandomTrace {
  std::vector<double> losses;           ///< Of this rank, training and evaluation.
  std::vector<double> norms;            ///< Of clipped gradients, before.
  std::vector<Outcome> failures;        ///< Of passes that were to fail.
  std::vector<NamedTensors> gradients;  ///< Of each step.
  NamedTensors parameters;              ///< After the last step.
};

// Optimizers: the same hyperparameters for both sides.

constexpr double kLr = 1e-2;
constexpr double kWeightDecay = 1e-2;
constexpr double kMomentum = 0.9;
// With a common, tiny eps, Adam divides what may be rounding noise by its own size. With this one an update's error is at most the
// gradient's.
constexpr double kEps = 1e-2;
constexpr double kGroupLr = 3e-2;
constexpr double kGroupWeightDecay = 0;
constexpr double kMaxNorm = 0.5;

inline double lr_factor(std::size_t step) { return 1.0 / (1.0 + 0.5 * static_cast<double>(step)); }

/// Every model has the parameter "gain", so that a group is never empty, which is refused.
inline bool in_group(const Case& c, const std::string& name) { return c.groups && (name == "gain" || mixed(c.seed, name) % 3 == 0); }

inline std::unique_ptr<torch::optim::Optimizer> adagrad(std::vector<at::Tensor> parameters) {
  return std::make_unique<torch::optim::Adagrad>(std::move(parameters), torch::optim::AdagradOptions(kLr).eps(kEps));
}

/// The library's, on a sharded model.
inline std::unique_ptr<Optimizer> library_optimizer(const Case& c, torch::nn::Module& model) {
  std::vector<ParamGroup> groups;
  if (c.groups) {
    groups.push_back(
        {.matches = [&c](const std::string& name) { return in_group(c, name); }, .lr = kGroupLr, .weight_decay = kGroupWeightDecay});
  }
  const AdamWOptions adamw{.lr = kLr, .eps = kEps, .weight_decay = kWeightDecay};
  switch (c.algorithm) {
    case Algorithm::kAdamW:
      return std::make_unique<AdamW>(model, adamw, groups);
    case Algorithm::kSGD:
      return std::make_unique<SGD>(model, SGDOptions{.lr = kLr, .momentum = kMomentum, .weight_decay = kWeightDecay}, groups);
    case Algorithm::kMuon:
      return std::make_unique<Muon>(model, MuonOptions{.lr = kLr, .weight_decay = kWeightDecay, .adamw = adamw}, groups);
    case Algorithm::kAdamW8bit:
      return std::make_unique<AdamW8bit>(model, AdamW8bitOptions{.lr = kLr, .eps = kEps, .weight_decay = kWeightDecay, .min_8bit_size = 64},
                                         groups);
    case Algorithm::kAdagrad:
      break;
  }
  return std::make_unique<WrappedOptimizer>(model, adagrad);
}

/// Where the algorithm lets parameters be cut; empty: anywhere.
inline std::function<Granularity(const std::string& name, const at::Tensor& parameter)> granularity_of(const Case& c) {
  if (c.algorithm == Algorithm::kMuon) return whole_matrices();
  if (c.algorithm == Algorithm::kAdamW8bit) return [](const auto&, const auto&) { return Granularity::blocks(AdamW8bit::kBlock); };
  if (!c.any_granularity) return {};
  return [&c](const std::string& name, const at::Tensor&) {
    const auto choice = mixed(c.seed + 3, c.uniform_granularity ? std::string_view("all") : std::string_view(name));
    switch (choice % 4) {
      case 0:
        return Granularity::element();
      case 1:
        return Granularity::rows();
      case 2:
        return Granularity::blocks(static_cast<std::int64_t>(1 + choice / 4 % 12));
      default:
        return Granularity::whole();
    }
  };
}

class Trainee {
 public:
  explicit Trainee(const Case& c) : case_(c) {}
  virtual ~Trainee() = default;
  Trainee(const Trainee&) = delete;
  Trainee& operator=(const Trainee&) = delete;

  RandomTrace train() {
    RandomTrace trace;
    for (std::size_t s = 0; s < case_.steps.size(); ++s) {
      const auto& plan = case_.steps[s];
      before_step(s);
      if (plan.zero_grad) zero_grad();
      std::size_t forwards = 0;
      const auto next_forward = [&] {
        forward(forwards, index(s, forwards), plan.penalty);
        ++forwards;
      };
      for (std::size_t p = 0; p < plan.passes.size(); ++p) {
        if (plan.failure.planned && plan.failure.before == p) trace.failures.push_back(failing_pass(index(s, kFailingBatch), plan.failure));
        do {
          if (forwards == p || plan.graphs_at_once) next_forward();
        } while (plan.graphs_at_once && forwards < plan.passes.size());
        if (plan.evaluate_between) trace.losses.push_back(evaluate(index(s, kEvaluationBatch)));
        trace.losses.push_back(backward(p, plan.passes[p]));
      }
      drop_graphs();
      if (plan.scale != 1) scale(plan.scale);
      trace.gradients.push_back(gradients());
      if (plan.evaluate_before_update) trace.losses.push_back(evaluate(index(s, kEvaluationBatch)));
      if (plan.clip) trace.norms.push_back(clip());
      optimizer_step(lr_factor(s));
      if (plan.write) write();
      if (plan.evaluate_after) trace.losses.push_back(evaluate(index(s, kEvaluationBatch)));
      if (plan.reload) reload(s);
    }
    trace.parameters = parameters();
    after_training();
    return trace;
  }

 protected:
  static std::uint64_t index(std::size_t step, std::size_t pass) { return kBatchesOfStep * step + pass; }
  /// Parameters that operators write between steps, as weight clipping or an average of weights would.
  bool is_written(const std::string& name) const { return mixed(case_.seed + 1, name) % 3 == 0; }
  /// One rank's loss. What dropout draws depends on batch and rank alone.
  at::Tensor loss(RandomModel& model, std::uint64_t batch, std::int64_t rank, bool penalty, std::shared_ptr<Fuse> fuse = {}) const {
    torch::manual_seed(mixed(mixed(case_.seed, batch), static_cast<std::uint64_t>(rank)) >> 1);
    auto part = make_batch(case_, batch, rank);
    part.fuse = std::move(fuse);
    part.attend = attend_;
    return model.loss(part, penalty);
  }

  /// Keeps its graph under a number.
  virtual void forward(std::size_t number, std::uint64_t batch, bool penalty) = 0;
  /// Returns the loss.
  virtual double backward(std::size_t number, const PassPlan& plan) = 0;
  virtual void drop_graphs() = 0;
  /// An exception drops what was collected and reduced since zero_grad(), if backward throws it.
  virtual Outcome failing_pass(std::uint64_t batch, const FailingPass& plan) = 0;
  virtual double evaluate(std::uint64_t batch) = 0;
  virtual void zero_grad() = 0;
  virtual void scale(double factor) = 0;
  virtual NamedTensors gradients() = 0;
  virtual double clip() = 0;
  virtual void optimizer_step(double factor) = 0;
  virtual void write() = 0;
  virtual NamedTensors parameters() = 0;
  virtual void before_step(std::size_t) {}
  virtual void reload(std::size_t) {}
  virtual void after_training() {}

  const Case& case_;
  std::function<void(const torch::nn::Module& module, bool present)> attend_;  ///< See Batch.
};

}  // namespace fsdp::testing
