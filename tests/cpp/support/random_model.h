#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "support/failing_operator.h"
#include "support/random.h"

// Random models of torch's own modules and bare parameters: nested, shared, tied, with branches and loops that depend on the data. The same
// seed builds the same model with the same values. Knows nothing of sharding.
//
// Chosen so that rounding stays rounding: smooth activations instead of kinks, and no parameter whose gradient is nothing but cancellation
// (a bias in front of a normalization over it alone).
namespace fsdp::testing {

/// Burns a step each time a block computes, forward (also when it is repeated in backward) or backward. At its end it throws; or, where
/// `operators` is not negative, so many operators later one does.
class Fuse {
 public:
  Fuse(std::int64_t steps, std::int64_t operators) : left_(steps), operators_(operators) {}
  void burn() {
    if (left_-- != 0) return;
    if (operators_ < 0) throw std::runtime_error("planned failure");
    FailingOperator::arm(operators_);
  }

 private:
  std::int64_t left_;
  std::int64_t operators_;
};

/// One rank's part of a batch.
struct Batch {
  at::Tensor tokens;                ///< [sequences, time]
  at::Tensor features;              ///< [sequences, time, dim]
  at::Tensor targets;               ///< As features.
  std::uint64_t decision = 0;       ///< Derived from the global batch, so that all ranks branch alike.
  std::int64_t part = 0;            ///< Which part this is: differs between ranks.
  bool all_attend = false;          ///< Every rank uses every module.
  std::shared_ptr<Fuse> fuse = {};  ///< Null: nothing fails.
  /// Called before a module that not every rank uses. Null: nobody wants to know.
  std::function<void(const torch::nn::Module& module, bool present)> attend = {};
};

/// A module that maps [sequences, time, dim] to the same shape. Its body is a closure over the submodules and parameters registered in it.
class Block : public torch::nn::Module {
 public:
  using Body = std::function<at::Tensor(const at::Tensor& x, const Batch& batch)>;
  at::Tensor forward(const at::Tensor& x, const Batch& batch) {
    if (!batch.fuse) return body(x, batch);
    batch.fuse->burn();
    const auto y = body(x, batch);
    if (y.requires_grad()) y.register_hook([fuse = batch.fuse](const at::Tensor&) { fuse->burn(); });
    return y;
  }
  Body body;
};

/// Recomputes in backward what forward did not keep: the nested kind of activation checkpointing, a backward inside of a backward.
class Checkpoint : public torch::autograd::Function<Checkpoint> {
 public:
  struct Call : torch::CustomClassHolder {
    explicit Call(std::function<at::Tensor(const at::Tensor&)> function_) : function(std::move(function_)) {}
    std::function<at::Tensor(const at::Tensor&)> function;
  };

  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const c10::intrusive_ptr<Call>& call) {
    context->save_for_backward({x});
    context->saved_data["call"] = c10::IValue::make_capsule(call);
    return call->function(x);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, torch::autograd::variable_list gradients) {
    const auto call = c10::static_intrusive_pointer_cast<Call>(context->saved_data["call"].toCapsule());
    const auto x = context->get_saved_variables()[0].detach().requires_grad_();
    {
      const torch::AutoGradMode with_grad(true);
      const auto y = call->function(x);
      if (y.requires_grad()) y.backward(gradients[0]);
    }
    return {x.grad(), at::Tensor()};
  }
};

/// How some blocks compute twice instead of keeping what autograd saves.
enum class Recompute : std::uint8_t {
  kNone,
  kNested,   ///< A checkpoint of the test's own. In both, gradients of several uses of a parameter arrive one by one.
  kLibrary,  ///< fsdp::activation_checkpoint.
};

struct ModelPlan {
  std::uint64_t seed = 0;
  at::ScalarType dtype = at::kFloat;    ///< Of parameters as they are made.
  at::ScalarType compute = at::kFloat;  ///< Of the activations between blocks; blocks compute in it, or in their own dtype if mixed.
  bool mixed_dtypes = false;            ///< Some blocks hold parameters of, and compute in, the other dtype.
  bool freezing = false;                ///< Some parameters do not require gradients.
  bool sharing = true;                  ///< Some modules are used in several places, some weights are tied or borrowed.
  bool by_rank = true;                  ///< Some blocks compute something else on each rank.
  bool looping = true;                  ///< Some blocks are run several times in a row, or not at all.
  bool attending = false;               ///< Some blocks are used by some ranks only.
  bool dropout = false;
  Recompute recompute = Recompute::kNone;
  std::int64_t piece = 0;  ///< Models of other pieces have other values.
  bool scalars = true;     ///< Some parameters have no dimension.
  std::int64_t dim = 8;    ///< Even: of 2 attention heads and 2 groups of channels.
  std::int64_t time = 4;
  std::int64_t vocab = 11;
};

class RandomModel : public torch::nn::Module {
 public:
  RandomModel(const ModelPlan& plan, std::shared_ptr<Block> first, std::shared_ptr<Block> second, bool has_embedding)
      : stem_(register_module("stem", torch::nn::Linear(plan.dim, plan.dim))),
        first_(register_module("first", std::move(first))),
        second_(register_module("second", std::move(second))),
        gain_(register_parameter("gain", at::ones({plan.dim}, plan.dtype))),
        ties_logits_(plan.sharing) {
    stem_->to(plan.dtype);
    if (!has_embedding) return;
    embedding_ = register_module("embedding", torch::nn::Embedding(plan.vocab, plan.dim));
    embedding_->to(plan.dtype);
  }

  /// With `penalize_input_gradient`, the loss contains the gradient of the outputs with respect to the inputs: backward differentiates
  /// twice.
  at::Tensor loss(const Batch& batch, bool penalize_input_gradient) {
    auto features = batch.features;
    if (penalize_input_gradient) features = features.detach().requires_grad_();
    auto x = embedding_ ? features + embedding_(batch.tokens) : features;
    x = first_->forward(stem_(x), batch);
    x = second_->forward(x, batch) * gain_;  // The first that backward touches: before any block can fail.
    auto loss = (x - batch.targets).square().mean();
    if (embedding_ && ties_logits_) loss = loss + logits_loss(x, batch.tokens);
    if (penalize_input_gradient) {
      const auto gradient = torch::autograd::grad({x.sin().sum()}, {features}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
      loss = loss + 0.1 * gradient.square().mean();
    }
    return loss;
  }

 private:
  /// The embedding's weights once more, outside of their own module.
  at::Tensor logits_loss(const at::Tensor& x, const at::Tensor& tokens) {
    const auto logits = at::linear(x, embedding_->weight).flatten(0, 1);
    return 0.1 * torch::nn::functional::cross_entropy(logits, tokens.flatten());
  }

  torch::nn::Embedding embedding_ = nullptr;
  torch::nn::Linear stem_;
  std::shared_ptr<Block> first_;
  std::shared_ptr<Block> second_;
  at::Tensor gain_;
  bool ties_logits_;
};

/// Each parameter once, under its first name: torch's own list repeats what is registered twice.
inline std::vector<std::pair<std::string, at::Tensor>> distinct_parameters(const torch::nn::Module& module) {
  std::vector<std::pair<std::string, at::Tensor>> parameters;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& item : module.named_parameters()) {
    if (seen.insert(item.value().unsafeGetTensorImpl()).second) parameters.emplace_back(item.key(), item.value());
  }
  return parameters;
}

}  // namespace fsdp::testing
