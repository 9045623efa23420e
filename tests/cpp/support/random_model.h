#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

// Random models of torch's own modules and bare parameters: nested, shared, tied, with branches and loops that depend on the data. The same
// seed builds the same model with the same values. Knows nothing of sharding.
//
// Chosen so that rounding stays rounding: smooth activations instead of kinks, and no parameter whose gradient is nothing but cancellation
// (a bias in front of a normalization over it alone).
namespace fsdp::testing {

/// The same numbers with every standard library.
class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}
  std::uint64_t bits() { return engine_(); }
  std::int64_t below(std::int64_t bound) { return static_cast<std::int64_t>(bits() % static_cast<std::uint64_t>(bound)); }
  bool chance(int percent) { return below(100) < percent; }
  template <typename T>
  const T& pick(const std::vector<T>& choices) {
    return choices[static_cast<std::size_t>(below(static_cast<std::int64_t>(choices.size())))];
  }

 private:
  std::mt19937_64 engine_;
};

/// A well-mixed function of its arguments (the finalizer of splitmix64), for decisions that must not depend on when they are asked for.
inline std::uint64_t mixed(std::uint64_t a, std::uint64_t b) {
  std::uint64_t z = a + 0x9e3779b97f4a7c15ULL * (b + 1);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

inline std::uint64_t mixed(std::uint64_t seed, std::string_view name) {
  for (const char c : name) seed = mixed(seed, static_cast<std::uint64_t>(static_cast<unsigned char>(c)));
  return seed;
}

enum class Failure : std::uint8_t { kNone, kForward, kBackward };

/// One rank's part of a batch.
struct Batch {
  at::Tensor tokens;           ///< [sequences, time]
  at::Tensor features;         ///< [sequences, time, dim]
  at::Tensor targets;          ///< As features.
  std::uint64_t decision = 0;  ///< Derived from the global batch, so that all ranks branch alike.
  std::int64_t part = 0;       ///< Which part this is: differs between ranks.
  Failure failure = Failure::kNone;
};

/// A module that maps [sequences, time, dim] to the same shape. Its body is a closure over the submodules and parameters registered in it.
class Block : public torch::nn::Module {
 public:
  using Body = std::function<at::Tensor(const at::Tensor& x, const Batch& batch)>;
  at::Tensor forward(const at::Tensor& x, const Batch& batch) { return body(x, batch); }
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

/// The identity, but backward throws.
class ThrowingBackward : public torch::autograd::Function<ThrowingBackward> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, const torch::autograd::variable_list&) {
    throw std::runtime_error("planned failure in backward");
  }
};

struct ModelPlan {
  std::uint64_t seed = 0;
  at::ScalarType dtype = at::kFloat;  ///< Of the activations between blocks.
  bool mixed_dtypes = false;          ///< Some blocks hold parameters of, and compute in, the other dtype.
  bool freezing = false;              ///< Some parameters do not require gradients.
  bool checkpointing = false;         ///< Some blocks recompute in backward.
  std::int64_t dim = 8;               ///< Even: of 2 attention heads and 2 groups of channels.
  std::int64_t time = 4;
  std::int64_t vocab = 11;
};

class RandomModel : public torch::nn::Module {
 public:
  RandomModel(const ModelPlan& plan, std::shared_ptr<Block> first, std::shared_ptr<Block> second, bool has_embedding)
      : stem_(register_module("stem", torch::nn::Linear(plan.dim, plan.dim))),
        first_(register_module("first", std::move(first))),
        second_(register_module("second", std::move(second))) {
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
    if (batch.failure == Failure::kForward) throw std::runtime_error("planned failure in forward");
    if (batch.failure == Failure::kBackward) x = ThrowingBackward::apply(x);
    x = second_->forward(x, batch);
    auto loss = (x - batch.targets).square().mean();
    if (embedding_) loss = loss + logits_loss(x, batch.tokens);
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
};

class ModelBuilder {
 public:
  explicit ModelBuilder(const ModelPlan& plan) : plan_(plan), random_(plan.seed) {}

  std::shared_ptr<RandomModel> build() {
    torch::manual_seed(plan_.seed);
    auto first = sequence(2);
    auto second = sequence(2);
    return std::make_shared<RandomModel>(plan_, std::move(first), std::move(second), random_.chance(50));
  }

 private:
  using BlockPtr = std::shared_ptr<Block>;

  BlockPtr block(int depth) {
    BlockPtr made;
    if (!made_.empty() && random_.chance(12)) return random_.pick(made_);  // one module in several places
    if (depth == 0 || random_.chance(55)) {
      made = leaf();
    } else {
      switch (random_.below(6)) {
        case 0:
          made = sequence(depth - 1);
          break;
        case 1:
          made = residual(depth - 1);
          break;
        case 2:
          made = branch(depth - 1);
          break;
        case 3:
          made = loop(depth - 1);
          break;
        case 4:
          made = without_gradient(depth - 1);
          break;
        default:
          made = plan_.checkpointing ? checkpointed(depth - 1) : residual(depth - 1);
      }
    }
    made_.push_back(made);
    return made;
  }

  // Blocks of blocks.

  BlockPtr sequence(int depth) {
    auto outer = std::make_shared<Block>();
    std::vector<BlockPtr> parts;
    const auto count = 1 + random_.below(3);
    for (std::int64_t i = 0; i < count; ++i) parts.push_back(outer->register_module(std::to_string(i), block(depth)));
    outer->body = [parts](at::Tensor x, const Batch& batch) {
      for (const auto& part : parts) x = part->forward(x, batch);
      return x;
    };
    return outer;
  }

  BlockPtr residual(int depth) {
    auto outer = std::make_shared<Block>();
    const auto inner = outer->register_module("inner", block(depth));
    outer->body = [inner](const at::Tensor& x, const Batch& batch) { return x + 0.5 * inner->forward(x, batch); };
    return outer;
  }

  BlockPtr branch(int depth) {
    auto outer = std::make_shared<Block>();
    std::vector<BlockPtr> choices;
    for (const auto* name : {"left", "right"}) choices.push_back(outer->register_module(name, block(depth)));
    const auto site = random_.bits();
    outer->body = [choices, site](const at::Tensor& x, const Batch& batch) {
      return choices[mixed(site, batch.decision) % choices.size()]->forward(x, batch);
    };
    return outer;
  }

  BlockPtr loop(int depth) {
    auto outer = std::make_shared<Block>();
    const auto inner = outer->register_module("inner", block(depth));
    const auto site = random_.bits();
    outer->body = [inner, site](at::Tensor x, const Batch& batch) {
      for (std::uint64_t left = mixed(site, batch.decision) % 3; left > 0; --left) x = x + 0.3 * inner->forward(x, batch);
      return x;
    };
    return outer;
  }

  BlockPtr without_gradient(int depth) {
    auto outer = std::make_shared<Block>();
    const auto inner = outer->register_module("inner", block(depth));
    outer->body = [inner](const at::Tensor& x, const Batch& batch) {
      at::Tensor y;
      {
        const torch::NoGradGuard no_grad;
        y = inner->forward(x, batch);
      }
      return x + 0.2 * y;
    };
    return outer;
  }

  BlockPtr checkpointed(int depth) {
    auto outer = std::make_shared<Block>();
    const auto inner = outer->register_module("inner", block(depth));
    outer->body = [inner](const at::Tensor& x, const Batch& batch) {
      // The graph needs an input that requires a gradient.
      if (!x.requires_grad()) return inner->forward(x, batch);
      return Checkpoint::apply(
          x, c10::make_intrusive<Checkpoint::Call>([inner, batch](const at::Tensor& input) { return inner->forward(input, batch); }));
    };
    return outer;
  }

  // Blocks of torch's modules and bare parameters.

  BlockPtr leaf() {
    auto made = std::make_shared<Block>();
    leaf_dtype_ = plan_.dtype;
    if (plan_.mixed_dtypes && random_.chance(40)) leaf_dtype_ = plan_.dtype == at::kFloat ? at::kDouble : at::kFloat;
    using Maker = Block::Body (ModelBuilder::*)(Block&);
    static const std::vector<Maker> makers = {
        &ModelBuilder::linear,     &ModelBuilder::conv1d,       &ModelBuilder::conv2d, &ModelBuilder::layer_norm,
        &ModelBuilder::group_norm, &ModelBuilder::batch_norm,   &ModelBuilder::mha,    &ModelBuilder::encoder_layer,
        &ModelBuilder::lstm,       &ModelBuilder::gru,          &ModelBuilder::bare,   &ModelBuilder::bare,
        &ModelBuilder::tied,       &ModelBuilder::tied,         &ModelBuilder::borrow, &ModelBuilder::chosen_by_rank,
        &ModelBuilder::untouched,  &ModelBuilder::some_by_rank,
    };
    const auto body = (this->*random_.pick(makers))(*made);
    made->body = [body, dtype = leaf_dtype_](const at::Tensor& x, const Batch& batch) {
      return body(x.to(dtype), batch).to(x.scalar_type());
    };
    return made;
  }

  bool trainable() { return !plan_.freezing || !random_.chance(25); }

  template <typename Holder>
  Holder add(Block& block, const std::string& name, Holder holder, bool may_freeze = true) {
    holder->to(leaf_dtype_);
    if (may_freeze) {
      for (auto& parameter : holder->parameters()) parameter.requires_grad_(trainable());
    }
    return block.register_module(name, holder);
  }

  at::Tensor add_parameter(Block& block, const std::string& name, at::IntArrayRef shape, double scale, double shift = 0) {
    return block.register_parameter(name, (scale * at::randn(shape) + shift).to(leaf_dtype_), trainable());
  }

  std::int64_t odd_size() { return 3 + 2 * random_.below(6); }

  Block::Body linear(Block& block) {
    const auto hidden = odd_size();
    auto in = add(block, "in", torch::nn::Linear(plan_.dim, hidden));
    auto out = add(block, "out", torch::nn::Linear(torch::nn::LinearOptions(hidden, plan_.dim).bias(random_.chance(50))));
    return [in, out](const at::Tensor& x, const Batch&) mutable { return out(torch::tanh(in(x))); };
  }

  Block::Body conv1d(Block& block) {
    const auto groups = random_.chance(50) ? 2 : 1;
    auto conv = add(block, "conv", torch::nn::Conv1d(torch::nn::Conv1dOptions(plan_.dim, plan_.dim, 3).padding(1).groups(groups)));
    return [conv](const at::Tensor& x, const Batch&) mutable { return conv(x.transpose(1, 2)).transpose(1, 2).tanh(); };
  }

  Block::Body conv2d(Block& block) {
    const auto channels = 2 + random_.below(4);
    auto in = add(block, "in", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, channels, 3).padding(1)));
    auto out = add(block, "out", torch::nn::Conv2d(torch::nn::Conv2dOptions(channels, 1, 1).bias(false)));
    return [in, out](const at::Tensor& x, const Batch&) mutable { return out(torch::sigmoid(in(x.unsqueeze(1)))).squeeze(1); };
  }

  Block::Body layer_norm(Block& block) {
    auto norm = add(block, "norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({plan_.dim})));
    return [norm](const at::Tensor& x, const Batch&) mutable { return norm(x); };
  }

  Block::Body group_norm(Block& block) {
    auto norm = add(block, "norm", torch::nn::GroupNorm(torch::nn::GroupNormOptions(2, plan_.dim)));
    return [norm](const at::Tensor& x, const Batch&) mutable { return norm(x.transpose(1, 2)).transpose(1, 2); };
  }

  Block::Body batch_norm(Block& block) {
    auto norm = add(block, "norm", torch::nn::BatchNorm1d(plan_.dim));
    norm->eval();  // its statistics would depend on how the batch is split
    return [norm](const at::Tensor& x, const Batch&) mutable { return norm(x.transpose(1, 2)).transpose(1, 2); };
  }

  Block::Body mha(Block& block) {
    auto attention = add(block, "attention", torch::nn::MultiheadAttention(plan_.dim, 2));
    return [attention](const at::Tensor& x, const Batch&) mutable {
      const auto sequence_first = x.transpose(0, 1);
      return std::get<0>(attention(sequence_first, sequence_first, sequence_first)).transpose(0, 1);
    };
  }

  Block::Body encoder_layer(Block& block) {
    auto options = torch::nn::TransformerEncoderLayerOptions(plan_.dim, 2).dim_feedforward(odd_size()).dropout(0).activation(torch::kGELU);
    auto layer = add(block, "layer", torch::nn::TransformerEncoderLayer(options));
    return [layer](const at::Tensor& x, const Batch&) mutable { return layer(x.transpose(0, 1)).transpose(0, 1); };
  }

  Block::Body lstm(Block& block) {
    const auto hidden = odd_size();
    const bool both_ways = random_.chance(30);
    auto options = torch::nn::LSTMOptions(plan_.dim, hidden).num_layers(1 + random_.below(2)).batch_first(true).bidirectional(both_ways);
    auto recurrent = add(block, "lstm", torch::nn::LSTM(options));
    auto out = add(block, "out", torch::nn::Linear(both_ways ? 2 * hidden : hidden, plan_.dim));
    return [recurrent, out](const at::Tensor& x, const Batch&) mutable { return out(std::get<0>(recurrent(x))); };
  }

  Block::Body gru(Block& block) {
    const auto hidden = odd_size();
    auto recurrent = add(block, "gru", torch::nn::GRU(torch::nn::GRUOptions(plan_.dim, hidden).batch_first(true)));
    auto out = add(block, "out", torch::nn::Linear(hidden, plan_.dim));
    return [recurrent, out](const at::Tensor& x, const Batch&) mutable { return out(std::get<0>(recurrent(x))); };
  }

  /// 0-D, empty, single-row and non-contiguous parameters.
  Block::Body bare(Block& block) {
    std::vector<at::Tensor> factors, terms, empty;
    if (random_.chance(60)) factors.push_back(add_parameter(block, "scale", {}, 0.1, 1));
    if (random_.chance(50)) terms.push_back(add_parameter(block, "shift", {plan_.dim}, 0.3));
    if (random_.chance(40)) factors.push_back(add_parameter(block, "row", {1, plan_.dim}, 0.2, 1));
    if (random_.chance(40)) empty.push_back(add_parameter(block, "empty", {0}, 1));
    if (random_.chance(30)) empty.push_back(add_parameter(block, "no_columns", {3, 0}, 1));
    if (random_.chance(30)) terms.push_back(add_parameter(block, "positions", {plan_.time, plan_.dim}, 0.1));
    if (random_.chance(30)) {
      const auto transposed = (0.1 * at::randn({plan_.dim, plan_.time})).to(leaf_dtype_).t();
      terms.push_back(block.register_parameter("transposed", transposed, trainable()));
    }
    return [factors, terms, empty](at::Tensor x, const Batch&) {
      for (const auto& factor : factors) x = (x * factor).tanh();  // a normalization would undo a bare factor
      for (const auto& term : terms) x = x + term;
      for (const auto& parameter : empty) x = x + parameter.sum();
      return x;
    };
  }

  /// A weight that other modules register, too.
  Block::Body tied(Block& block) {
    std::vector<at::Tensor> same_dtype;
    for (const auto& weight : tied_) {
      if (weight.scalar_type() == leaf_dtype_) same_dtype.push_back(weight);
    }
    at::Tensor weight;
    if (!same_dtype.empty() && random_.chance(70)) {
      weight = random_.pick(same_dtype);
      block.register_parameter("weight", weight, weight.requires_grad());
    } else {
      weight = add_parameter(block, "weight", {plan_.dim, plan_.dim}, 0.3);
      tied_.push_back(weight);
    }
    const auto bias = add_parameter(block, "bias", {plan_.dim}, 0.1);
    return [weight, bias](const at::Tensor& x, const Batch&) { return at::linear(x, weight, bias).tanh(); };
  }

  /// A parameter of another module, used without being registered here, in one operator with an own one.
  Block::Body borrow(Block& block) {
    const auto own = add_parameter(block, "own", {plan_.dim, plan_.dim}, 0.2);
    std::vector<at::Tensor> same_dtype;
    for (const auto& weight : tied_) {
      if (weight.scalar_type() == leaf_dtype_) same_dtype.push_back(weight);
    }
    if (same_dtype.empty()) return [own](const at::Tensor& x, const Batch&) { return at::linear(x, own); };
    const auto other = random_.pick(same_dtype);
    return [own, other](const at::Tensor& x, const Batch&) { return at::linear(x, own + other).tanh(); };
  }

  /// Ranks use different parameters of one unit at the same place ("local": not to be made units of their own).
  Block::Body chosen_by_rank(Block& block) {
    auto even = add(block, "local_even", torch::nn::Linear(plan_.dim, plan_.dim), /*may_freeze=*/false);
    auto odd = add(block, "local_odd", torch::nn::Linear(plan_.dim, plan_.dim), /*may_freeze=*/false);
    return [even, odd](const at::Tensor& x, const Batch& batch) mutable { return x + 0.5 * (batch.part % 2 == 0 ? even(x) : odd(x)); };
  }

  /// Some ranks use a parameter more than others, of a unit that all use.
  Block::Body some_by_rank(Block& block) {
    auto always = add(block, "local_always", torch::nn::Linear(plan_.dim, plan_.dim), /*may_freeze=*/false);
    const auto sometimes = block.register_parameter("sometimes", at::ones({plan_.dim}, leaf_dtype_));
    return [always, sometimes](const at::Tensor& x, const Batch& batch) mutable {
      const auto y = always(x);
      return batch.part % 2 == 0 ? y * sometimes : y;
    };
  }

  Block::Body untouched(Block& block) {
    add(block, "linear", torch::nn::Linear(plan_.dim, odd_size()));
    return [](const at::Tensor& x, const Batch&) { return x; };
  }

  ModelPlan plan_;
  Random random_;
  at::ScalarType leaf_dtype_ = at::kFloat;
  std::vector<BlockPtr> made_;  // finished, so that reusing one makes no cycle
  std::vector<at::Tensor> tied_;
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
