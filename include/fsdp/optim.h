#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace fsdp {

namespace engine {
class Engine;
}

/// Parameters whose names `matches` accepts get these settings instead of the optimizer's own. The first group that matches wins. A group
/// that matches no parameter is an Error.
struct ParamGroup {
  std::function<bool(const std::string& name)> matches;  ///< Names are fully qualified.
  std::optional<double> lr = {};                         ///< By default the optimizer's.
  std::optional<double> weight_decay = {};               ///< By default the optimizer's.
  /// By default the optimizer's. AdamW has them, also within Muon and AdamW8bit; with others, or for Muon's matrices, they are an Error.
  std::optional<std::tuple<double, double>> betas = {};
  std::optional<double> eps = {};  ///< By default the optimizer's. An Error for SGD, which has none.
};

/// An optimizer on this rank's shards of a module that fully_shard has sharded. Sharding never changes an update. AdamW and SGD are
/// elementwise, and the same gradients give the same bits as torch's own optimizer on the unsharded parameters. Muon and AdamW8bit are not
/// elementwise, and require shards that do not cut a matrix or a block. Parameters without a gradient are skipped, as torch does.
class Optimizer {
 public:
  virtual ~Optimizer();
  Optimizer(Optimizer&&) noexcept;  ///< Moves; the other one can only be destroyed.
  Optimizer& operator=(Optimizer&&) noexcept;

  /// Updates the main parameters from the reduced gradients. The engine then drops stale gathered copies and bumps the parameters' versions
  /// (so backward through an older graph raises torch's in-place error).
  void step();
  /// Drops the gradients.
  void zero_grad();
  /// Multiplies every group's base learning rate (as given at construction, or to set_lr) by a factor, such as a schedule's, from the next
  /// step on.
  void set_lr_factor(double factor);
  /// Sets the factor of one group, until the next set_lr_factor(factor). Groups are numbered from 0 in the order in which they were passed;
  /// those of a WrappedOptimizer are torch's param_groups(). Throws Error if there is no such group.
  void set_lr_factor(std::size_t group, double factor);
  /// Sets the base learning rate of the parameters that no ParamGroup matches (of a WrappedOptimizer's first group; of Muon's matrices)
  /// from the next step on. Throws Error if negative.
  void set_lr(double lr);
  /// Sets the base learning rate of one group.
  void set_lr(std::size_t group, double lr);
  /// The current learning rate, with its factor, of the parameters that set_lr(lr) applies to.
  double lr() const;
  /// The current learning rate of one group, with its factor.
  double lr(std::size_t group) const;

  const std::shared_ptr<engine::Engine>& engine() const;  ///< The engine of its module. For the library's own use.

  /// For the library's own use.
  struct State;
  State& state() { return *state_; }  ///< For the library's own use.

 protected:
  explicit Optimizer(std::unique_ptr<State> state);  ///< For the optimizers of this library.
  std::unique_ptr<State> state_;                     ///< The parameters and their optimizer state.
};

/// Defaults are torch.optim.AdamW's.
struct AdamWOptions {
  double lr = 1e-3;                                 ///< Learning rate.
  std::tuple<double, double> betas = {0.9, 0.999};  ///< Decay of the averages of the gradient and of its square.
  double eps = 1e-8;                                ///< Added to the denominator.
  double weight_decay = 1e-2;                       ///< Times the learning rate.
};

/// Adam with decoupled weight decay (Loshchilov and Hutter, 2019) through ATen's fused kernel.
class AdamW : public Optimizer {
 public:
  /// `module` is one that fully_shard has sharded; its groups' settings come before the options. Throws Error if an option is out of range.
  AdamW(torch::nn::Module& module, AdamWOptions options = {}, std::vector<ParamGroup> groups = {});
};

/// Defaults are torch.optim.SGD's.
struct SGDOptions {
  double lr = 1e-3;         ///< Learning rate.
  double momentum = 0;      ///< The factor of the sum of earlier gradients; with 0, no sum is kept.
  double dampening = 0;     ///< The part of a new gradient that does not enter the momentum.
  double weight_decay = 0;  ///< L2 penalty: times the parameter, added to the gradient.
  bool nesterov = false;    ///< Needs momentum, and no dampening.
};

/// Stochastic gradient descent with momentum through ATen's fused kernel.
class SGD : public Optimizer {
 public:
  /// Has the parameters and the errors of AdamW's constructor.
  SGD(torch::nn::Module& module, SGDOptions options, std::vector<ParamGroup> groups = {});
};

/// Makes a torch optimizer over this rank's shards of the parameters that are trained, in the order of named_parameters(); frozen and
/// ignored parameters have none.
using TorchOptimizerFactory = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor> parameters)>;
/// A TorchOptimizerFactory that also takes names; names[i] is the fully qualified name of parameters[i].
using NamedTorchOptimizerFactory =
    std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor> parameters, std::vector<std::string> names)>;

/// Runs any torch::optim optimizer on the shards: `fsdp::wrap(*model, [](auto shards) { return
/// std::make_unique<torch::optim::Adagrad>(shards, 0.01); })`. The optimizer sees one 1-D tensor per parameter (possibly empty), so results
/// are exact for elementwise optimizers only. set_lr_factor scales the options' learning rate. Checkpoints contain the state of Adam,
/// AdamW, SGD, RMSprop and Adagrad.
class WrappedOptimizer : public Optimizer {
 public:
  /// See wrap().
  WrappedOptimizer(torch::nn::Module& module, const TorchOptimizerFactory& factory);
  /// See wrap().
  WrappedOptimizer(torch::nn::Module& module, const NamedTorchOptimizerFactory& factory);
  /// Use it to read the optimizer, and to set options (except learning rates, see set_lr). Only step() may write its parameters and state.
  torch::optim::Optimizer& torch_optimizer();

 private:
  struct Wrapped;
};

/// Returns a WrappedOptimizer of the optimizer that `factory` makes for this rank's shards. Throws Error if the module is not sharded.
WrappedOptimizer wrap(torch::nn::Module& module, const TorchOptimizerFactory& factory);
/// wrap() with a factory that takes names, for groups of parameters: `[](auto shards, auto names) { ... }`.
WrappedOptimizer wrap(torch::nn::Module& module, const NamedTorchOptimizerFactory& factory);

}  // namespace fsdp
