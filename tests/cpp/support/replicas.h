#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "fsdp/fsdp.h"
#include "support/exact_arithmetic.h"
#include "support/model_builder.h"
#include "support/random_training.h"

// Data parallelism written out in one process: each rank's forward and backward one after the other, and the sums of gradients in the
// order that the documents give. But for the updates of Muon and AdamW8bit, nothing goes through the library.
namespace fsdp::testing {

/// The ranks in rows of so many: gradients are summed within each row, scaled, and the rows' sums are summed.
struct SumOrder {
  std::int64_t row = 1;
  bool rows = false;  ///< Otherwise all ranks are one row, whose sum is final.
  bool operator==(const SumOrder&) const = default;
};

/// On a mesh of rows of a power of two of ranks, without rounding in between, the sum is that over all ranks.
inline SumOrder sum_order(const Case& c, const Settings& settings) {
  if (settings.outer == 1) return {.row = c.ranks, .rows = false};
  const auto row = c.ranks / settings.outer;
  const bool flat = std::has_single_bit(static_cast<unsigned>(c.ranks)) && !c.rounds() && !c.delays_outer_sums();
  return flat ? SumOrder{.row = c.ranks, .rows = false} : SumOrder{.row = row, .rows = true};
}

/// A parameter of the replicas, and what ranks hold of its gradient.
struct Replica {
  std::string name;
  at::Tensor whole;  ///< The module's.
  at::Tensor main;   ///< May share its memory.
  at::ScalarType main_gradient = at::kFloat;
  at::ScalarType wire = at::kFloat;
  std::vector<at::Tensor> unreduced = {};  ///< By rank.
  std::vector<at::Tensor> partial = {};    ///< By row.
  at::Tensor gradient = {};

  at::ScalarType precise() const { return wire == at::kDouble ? at::kDouble : at::kFloat; }

  void collect(std::size_t rank, const at::Tensor& value, bool sync) {
    auto& mine = unreduced[rank];
    if (mine.defined()) {
      mine.add_(value);
    } else {
      mine = value.to(sync ? wire : main_gradient, /*non_blocking=*/false, /*copy=*/true);
    }
  }

  void reduce(const SumOrder& order, bool all_reduce) {
    const auto ranks = unreduced.size();
    if (std::any_of(unreduced.begin(), unreduced.end(), [](const at::Tensor& t) { return t.defined(); })) {
      const auto row = static_cast<std::size_t>(order.row);
      for (std::size_t o = 0; o * row < ranks; ++o) {
        std::vector<at::Tensor> terms;
        for (std::size_t r = o * row; r < (o + 1) * row; ++r) {
          terms.push_back(unreduced[r].defined() ? unreduced[r].to(wire).to(precise()) : at::zeros(main.sizes(), precise()));
        }
        add(order.rows ? partial[o] : gradient, sum_in_pairs(terms) * (1.0 / static_cast<double>(ranks)));
      }
      for (auto& mine : unreduced) mine = at::Tensor();
    }
    if (!order.rows || !all_reduce || !partial[0].defined()) return;
    std::vector<at::Tensor> terms;
    for (auto& mine : partial) terms.push_back(std::exchange(mine, {}).to(wire).to(precise()));
    add(gradient, sum_in_pairs(terms));
  }

  void drop() {
    for (auto& mine : unreduced) mine = at::Tensor();
    for (auto& mine : partial) mine = at::Tensor();
    gradient = at::Tensor();
  }

 private:
  /// Rounds once: a sum that exists is added to before.
  void add(at::Tensor& sum, const at::Tensor& term) const { sum = (sum.defined() ? sum.to(precise()) + term : term).to(main_gradient); }
};

/// ATen's fused kernels, as torch's own optimizers call them, parameter by parameter; or torch's Adagrad.
class WholeOptimizer {
 public:
  WholeOptimizer(const Case& c, const std::vector<Replica>& replicas) : algorithm_(c.algorithm) {
    if (algorithm_ == Algorithm::kAdagrad) {
      std::vector<at::Tensor> tensors;
      for (const auto& replica : replicas) tensors.push_back(replica.main);
      torch_ = adagrad(std::move(tensors));
      return;
    }
    for (const auto& replica : replicas) {
      const bool grouped = in_group(c, replica.name);
      states_.push_back({.lr = grouped ? kGroupLr : kLr,
                         .weight_decay = grouped ? kGroupWeightDecay : kWeightDecay,
                         .first = at::zeros_like(replica.main),
                         .second = at::zeros_like(replica.main),
                         .step = at::zeros({}, at::kFloat)});
    }
  }

  void step(const std::vector<Replica>& replicas, double factor) {
    for (std::size_t i = 0; i < replicas.size(); ++i) {
      const auto& replica = replicas[i];
      const auto gradient = replica.gradient.defined() ? replica.gradient.to(replica.main.scalar_type()) : at::Tensor();
      if (torch_) {
        torch_->param_groups()[0].params()[i].mutable_grad() = gradient;
        continue;
      }
      if (!gradient.defined()) continue;
      auto& state = states_[i];
      state.step += 1;
      if (algorithm_ == Algorithm::kAdamW) {
        at::_fused_adamw_({replica.main}, {gradient}, {state.first}, {state.second}, {}, {state.step}, state.lr * factor, 0.9, 0.999,
                          state.weight_decay, kEps, /*amsgrad=*/false, /*maximize=*/false);
      } else {
        at::_fused_sgd_({replica.main}, {gradient}, {state.first}, state.weight_decay, kMomentum, state.lr * factor, /*dampening=*/0,
                        /*nesterov=*/false, /*maximize=*/false, /*is_first_step=*/state.step.item<float>() == 1);
      }
    }
    if (!torch_) return;
    torch_->param_groups()[0].options().set_lr(kLr * factor);
    torch_->step();
  }

 private:
  struct State {
    double lr;
    double weight_decay;
    at::Tensor first;
    at::Tensor second;
    at::Tensor step;
  };
  Algorithm algorithm_;
  std::vector<State> states_;
  std::unique_ptr<torch::optim::Optimizer> torch_;
};

/// The library's own optimizer on one rank that has everything: for algorithms whose arithmetic has tests of its own. Gets its gradients
/// as those of a loss that is linear in the parameters.
class OneRankOptimizer {
 public:
  explicit OneRankOptimizer(const Case& c)
      : model_(ModelBuilder(c.model).build()),
        handle_(fully_shard(*model_, {.mesh = null_device_mesh({{"dp_shard", 1}}), .granularity = granularity_of(c)})),
        optimizer_(library_optimizer(c, *model_)) {}

  void step(const std::vector<Replica>& replicas, double factor) {
    std::unordered_map<std::string, const Replica*> by_name;
    for (const auto& replica : replicas) by_name.emplace(replica.name, &replica);
    for (const auto& shard : handle_.parameter_shards()) {
      if (by_name.contains(shard.name)) shard.value.copy_(by_name[shard.name]->main.flatten());
    }
    handle_.main_parameters_changed();
    optimizer_->zero_grad();
    {
      const torch::AutoGradMode with_grad(true);
      at::Tensor loss;
      for (const auto& [name, parameter] : distinct_parameters(*model_)) {
        if (!by_name.contains(name) || !by_name[name]->gradient.defined()) continue;
        const auto term = (parameter * by_name[name]->gradient.to(parameter.scalar_type())).sum();
        loss = loss.defined() ? loss + term : term;
      }
      if (!loss.defined()) return;
      loss.backward();
    }
    optimizer_->set_lr_factor(factor);
    optimizer_->step();
    for (const auto& [name, value] : handle_.full_parameters()) {
      if (by_name.contains(name)) at::Tensor(by_name[name]->main).copy_(value);
    }
  }

 private:
  std::shared_ptr<RandomModel> model_;
  FSDPModule handle_;
  std::unique_ptr<Optimizer> optimizer_;
};

class Replicas final : public Trainee {
 public:
  /// `rank`: whose losses the trace shows. `sharded`: what the sharded training found. It sums the squares of norms in an order of its own:
  /// gradients are clipped by its norms, which are compared to rounding, or to `tolerance` if that is more. `pieces`: who trains replicas
  /// of the other tensor-parallel pieces; undefined if there are none.
  Replicas(const Case& c, SumOrder order, std::int64_t rank, const RandomTrace& sharded, double tolerance, DeviceMesh pieces)
      : Trainee(c),
        order_(order),
        rank_(rank),
        norms_(sharded.norms),
        failures_(sharded.failures),
        norm_tolerance_(std::max(tolerance, 1e-12)),
        pieces_(std::move(pieces)),
        model_(ModelBuilder(c.model).build()) {
    const torch::NoGradGuard no_grad;
    for (auto& [name, parameter] : distinct_parameters(*model_)) {
      if (is_ignored(c, name)) {
        ignored_.push_back({.name = name, .whole = parameter});
        continue;
      }
      // As sharded parameters lie: ATen's kernels round the last few elements in memory differently.
      parameter.set_data(parameter.detach().contiguous());
      Replica replica{.name = name,
                      .whole = parameter,
                      .main = parameter.detach(),
                      .main_gradient = parameter.scalar_type(),
                      .wire = parameter.scalar_type()};
      if (c.has_policy) {
        replica.main = parameter.detach().clone();
        replica.main_gradient = c.precision.main_gradient;
        replica.wire = c.precision.wire;
        parameter.set_data(parameter.detach().to(c.precision.compute));
      }
      replica.unreduced.resize(static_cast<std::size_t>(c.ranks));
      replica.partial.resize(static_cast<std::size_t>(c.ranks / order.row));
      replicas_.push_back(std::move(replica));
    }
    if (c.algorithm == Algorithm::kMuon || c.algorithm == Algorithm::kAdamW8bit) {
      one_rank_ = std::make_unique<OneRankOptimizer>(c);
    } else {
      optimizer_ = std::make_unique<WholeOptimizer>(c, replicas_);
    }
    watch();
    show();
  }

 protected:
  void forward(std::size_t number, std::uint64_t batch, bool penalty) override {
    if (losses_.size() <= number) losses_.resize(number + 1);
    for (std::int64_t rank = 0; rank < case_.ranks; ++rank) losses_[number].push_back(loss(*model_, batch, rank, penalty));
  }

  double backward(std::size_t number, const PassPlan& plan) override {
    for (std::size_t rank = 0; rank < losses_[number].size(); ++rank) run_backward(losses_[number][rank], rank, plan.sync);
    if (plan.sync) {
      for (auto& replica : replicas_) replica.reduce(order_, plan.all_reduce);
    }
    return losses_[number][static_cast<std::size_t>(rank_)].item<double>();
  }
  void drop_graphs() override { losses_.clear(); }

  /// Where an operator is to fail, which one depends on the operators of the library: what came of it is given.
  Outcome failing_pass(std::uint64_t batch, const FailingPass& plan) override {
    std::vector<Outcome> outcomes;
    const auto given = next_failure_ < failures_.size() ? failures_[next_failure_++] : Outcome::kCompleted;
    if (plan.operators >= 0 && given != Outcome::kCompleted) {
      if (given == Outcome::kFailedBackward) zero_grad();
      return given;
    }
    for (std::int64_t rank = 0; rank < case_.ranks; ++rank) {
      auto outcome = Outcome::kFailedForward;
      try {
        const auto value =
            loss(*model_, batch, rank, /*penalty=*/false, plan.operators < 0 ? std::make_shared<Fuse>(plan.fuse, -1) : nullptr);
        outcome = Outcome::kFailedBackward;
        run_backward(value, static_cast<std::size_t>(rank), plan.sync);
        outcome = Outcome::kCompleted;
      } catch (const std::runtime_error&) {
      }
      outcomes.push_back(outcome);
    }
    EXPECT_EQ(outcomes, std::vector(outcomes.size(), outcomes.front())) << "a bad case: ranks differ in where they fail";
    if (outcomes.front() == Outcome::kCompleted && plan.sync) {
      for (auto& replica : replicas_) replica.reduce(order_, /*all_reduce=*/true);
    } else if (outcomes.front() == Outcome::kFailedBackward) {
      zero_grad();
    }
    return outcomes.front();
  }

  double evaluate(std::uint64_t batch) override {
    const torch::NoGradGuard no_grad;
    return loss(*model_, batch, rank_, /*penalty=*/false).item<double>();
  }

  void zero_grad() override {
    for (auto& replica : replicas_) replica.drop();
    for (auto& ignored : ignored_) ignored.gradient = at::Tensor();
  }

  void scale(double factor) override {
    for (auto& replica : replicas_) {
      if (replica.gradient.defined()) replica.gradient.mul_(factor);
    }
  }

  NamedTensors gradients() override {
    NamedTensors gradients;
    for (const auto& replica : replicas_) {
      gradients.emplace_back(replica.name, replica.gradient.defined() ? replica.gradient.clone() : at::Tensor());
    }
    for (const auto& ignored : ignored_) {
      gradients.emplace_back(ignored.name, ignored.gradient.defined() ? ignored.gradient.clone() : at::Tensor());
    }
    return gradients;
  }

  double clip() override {
    double squares = 0;
    for (const auto& replica : replicas_) {
      if (replica.gradient.defined()) squares += replica.gradient.to(at::kDouble).square().sum().item<double>();
    }
    if (case_.pieces > 1) squares = pieces_.sum(squares);
    const double norm = next_norm_ < norms_.size() ? norms_[next_norm_++] : 0;
    const double expected = std::sqrt(squares);
    EXPECT_NEAR(norm, expected, norm_tolerance_ * expected) << "the norm of the gradients";
    const double factor = kMaxNorm / (norm + 1e-6);
    if (factor < 1) scale(factor);
    return norm;
  }

  void optimizer_step(double factor) override {
    const torch::NoGradGuard no_grad;
    if (one_rank_) {
      one_rank_->step(replicas_, factor);
    } else {
      optimizer_->step(replicas_, factor);
    }
    show();
  }

  /// Main parameters keep their digits where the operator changed nothing that is seen.
  void write() override {
    const torch::NoGradGuard no_grad;
    for (auto& replica : replicas_) {
      if (!is_written(replica.name)) continue;
      const auto before = replica.whole.clone();
      replica.whole.mul_(0.9);
      if (!case_.has_policy) continue;
      replica.main.copy_(at::where(replica.whole == before, replica.main, replica.whole.to(replica.main.scalar_type())));
    }
    for (auto& ignored : ignored_) {
      if (is_written(ignored.name)) ignored.whole.mul_(0.9);
    }
  }

  NamedTensors parameters() override {
    NamedTensors values;
    for (const auto& replica : replicas_) values.emplace_back(replica.name, replica.main.clone());
    for (const auto& ignored : ignored_) values.emplace_back(ignored.name, ignored.whole.detach().clone());
    return values;
  }

 private:
  struct Ignored {
    std::string name;
    at::Tensor whole;
    at::Tensor gradient = {};
  };

  /// Takes a gradient from autograd when it arrives: a checkpoint delivers those of several uses one by one.
  class Collect final : public torch::autograd::PostAccumulateGradHook {
   public:
    explicit Collect(std::function<void(const at::Tensor&)> take) : take_(std::move(take)) {}
    void operator()(const at::Tensor& parameter) override {
      const auto gradient = std::exchange(parameter.mutable_grad(), {});
      if (gradient.defined()) take_(gradient);  // Undefined where a checkpoint's backward has delivered it already.
    }

   private:
    std::function<void(const at::Tensor&)> take_;
  };

  void watch() {
    for (auto& replica : replicas_) {
      if (!replica.whole.requires_grad()) continue;
      torch::autograd::impl::set_post_acc_grad_hooks(replica.whole, std::make_unique<Collect>([&](const at::Tensor& gradient) {
                                                       replica.collect(collecting_rank_, gradient, collecting_sync_);
                                                     }));
    }
    for (auto& ignored : ignored_) {
      if (!ignored.whole.requires_grad()) continue;
      torch::autograd::impl::set_post_acc_grad_hooks(ignored.whole, std::make_unique<Collect>([&](const at::Tensor& gradient) {
                                                       if (static_cast<std::int64_t>(collecting_rank_) != rank_) return;
                                                       ignored.gradient =
                                                           ignored.gradient.defined() ? ignored.gradient + gradient : gradient;
                                                     }));
    }
  }

  void run_backward(const at::Tensor& loss, std::size_t rank, bool sync) {
    collecting_rank_ = rank;
    collecting_sync_ = sync;
    loss.backward();
  }

  /// What modules compute with.
  void show() {
    if (!case_.has_policy) return;
    const torch::NoGradGuard no_grad;
    for (auto& replica : replicas_) {
      replica.whole.copy_(is_gathered_in_float8(case_, replica.name) ? through_float8(replica.main, kFloat8Block) : replica.main);
    }
  }

  SumOrder order_;
  std::int64_t rank_;
  std::size_t collecting_rank_ = 0;  ///< Whose backward runs,
  bool collecting_sync_ = true;      ///< and whether its gradients are reduced at its end.
  std::vector<double> norms_;
  std::size_t next_norm_ = 0;
  std::vector<Outcome> failures_;
  std::size_t next_failure_ = 0;
  double norm_tolerance_;
  DeviceMesh pieces_;
  std::shared_ptr<RandomModel> model_;
  std::vector<Replica> replicas_;
  std::vector<Ignored> ignored_;
  std::unique_ptr<WholeOptimizer> optimizer_;
  std::unique_ptr<OneRankOptimizer> one_rank_;
  std::vector<std::vector<at::Tensor>> losses_;
};

}  // namespace fsdp::testing
