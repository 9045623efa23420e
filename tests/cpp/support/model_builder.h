#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/activation_checkpoint.h"
#include "support/random_model.h"

namespace fsdp::testing {

class ModelBuilder {
 public:
  explicit ModelBuilder(const ModelPlan& plan) : plan_(plan), random_(plan.seed) {}

  std::shared_ptr<RandomModel> build() {
    torch::manual_seed(plan_.seed);
    auto first = sequence(2);
    auto second = sequence(2);
    auto model = std::make_shared<RandomModel>(plan_, std::move(first), std::move(second), random_.chance(50));
    if (plan_.piece != 0) {
      const torch::NoGradGuard no_grad;
      for (auto& [name, parameter] : distinct_parameters(*model)) parameter.mul_(1 + 0.25 * static_cast<double>(plan_.piece));
    }
    return model;
  }

 private:
  using BlockPtr = std::shared_ptr<Block>;

  BlockPtr block(int depth) {
    BlockPtr made;
    if (plan_.sharing && !made_.empty() && random_.chance(12)) return random_.pick(made_);  // one module in several places
    if (plan_.attending && !inside_optional_ && random_.chance(25)) {
      made = attended(depth);
    } else if (depth == 0 || random_.chance(55)) {
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
          made = plan_.looping ? loop(depth - 1) : residual(depth - 1);
          break;
        case 4:
          made = without_gradient(depth - 1);
          break;
        default:
          made = plan_.recompute != Recompute::kNone ? checkpointed(depth - 1) : residual(depth - 1);
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
    outer->body = [inner, recompute = plan_.recompute](const at::Tensor& x, const Batch& batch) {
      const auto call = [inner, batch](const at::Tensor& input) { return inner->forward(input, batch); };
      if (recompute == Recompute::kLibrary) return fsdp::activation_checkpoint(call, x);
      // The graph needs an input that requires a gradient.
      if (!x.requires_grad()) return call(x);
      return Checkpoint::apply(x, c10::make_intrusive<Checkpoint::Call>(call));
    };
    return outer;
  }

  /// Ranks skip the inner block, which is a unit of its own ("optional"). None is within another one, before which all would have to say
  /// that they skip it, too.
  BlockPtr attended(int depth) {
    inside_optional_ = true;
    auto outer = std::make_shared<Block>();
    const auto inner = outer->register_module("optional", depth == 0 ? leaf() : block(depth - 1));
    inside_optional_ = false;
    const auto site = random_.bits();
    outer->body = [inner, site](const at::Tensor& x, const Batch& batch) {
      const auto draw = mixed(mixed(site, batch.decision), static_cast<std::uint64_t>(batch.part));
      const bool present = batch.all_attend || draw % 5 < 3;
      if (batch.attend) batch.attend(*inner, present);
      return present ? x + 0.5 * inner->forward(x, batch) : x;
    };
    return outer;
  }

  // Blocks of torch's modules and bare parameters.

  BlockPtr leaf() {
    auto made = std::make_shared<Block>();
    leaf_dtype_ = plan_.dtype;
    auto compute = plan_.compute;
    if (plan_.mixed_dtypes && random_.chance(40)) compute = leaf_dtype_ = plan_.dtype == at::kFloat ? at::kDouble : at::kFloat;
    using Maker = Block::Body (ModelBuilder::*)(Block&);
    static const std::vector<Maker> makers = {
        &ModelBuilder::linear,     &ModelBuilder::conv1d,       &ModelBuilder::conv2d, &ModelBuilder::layer_norm,
        &ModelBuilder::group_norm, &ModelBuilder::batch_norm,   &ModelBuilder::mha,    &ModelBuilder::encoder_layer,
        &ModelBuilder::lstm,       &ModelBuilder::gru,          &ModelBuilder::bare,   &ModelBuilder::bare,
        &ModelBuilder::tied,       &ModelBuilder::tied,         &ModelBuilder::borrow, &ModelBuilder::chosen_by_rank,
        &ModelBuilder::untouched,  &ModelBuilder::some_by_rank, &ModelBuilder::views,  &ModelBuilder::views,
    };
    // In half precision not all of torch's modules compute on the CPU, and a normalization's buffers would have to be converted with it.
    static const std::vector<Maker> narrow_makers = {
        &ModelBuilder::linear,        &ModelBuilder::layer_norm,     &ModelBuilder::mha,
        &ModelBuilder::encoder_layer, &ModelBuilder::bare,           &ModelBuilder::bare,
        &ModelBuilder::tied,          &ModelBuilder::borrow,         &ModelBuilder::views,
        &ModelBuilder::views,         &ModelBuilder::chosen_by_rank, &ModelBuilder::untouched,
        &ModelBuilder::some_by_rank,
    };
    const bool narrow = compute != at::kFloat && compute != at::kDouble;
    auto maker = random_.pick(narrow ? narrow_makers : makers);
    if (!plan_.by_rank && (maker == &ModelBuilder::chosen_by_rank || maker == &ModelBuilder::some_by_rank)) maker = &ModelBuilder::linear;
    const auto body = (this->*maker)(*made);
    made->body = [body, dtype = compute](const at::Tensor& x, const Batch& batch) { return body(x.to(dtype), batch).to(x.scalar_type()); };
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
    const double dropped = plan_.dropout && random_.chance(50) ? 0.25 : 0;
    return [in, out, dropped](const at::Tensor& x, const Batch&) mutable {
      const auto y = torch::tanh(in(x));
      return out(dropped == 0 ? y : at::dropout(y, dropped, /*train=*/true));
    };
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
    if (random_.chance(60))
      factors.push_back(add_parameter(block, "scale", plan_.scalars ? at::IntArrayRef{} : at::IntArrayRef{1}, 0.1, 1));
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

  /// Weights that other modules may take, too.
  std::vector<at::Tensor> tied_weights() const {
    std::vector<at::Tensor> same_dtype;
    for (const auto& weight : tied_) {
      if (weight.scalar_type() == leaf_dtype_) same_dtype.push_back(weight);
    }
    return same_dtype;
  }

  /// A weight that other modules register, too.
  Block::Body tied(Block& block) {
    const auto same_dtype = tied_weights();
    at::Tensor weight;
    if (!same_dtype.empty() && random_.chance(70)) {
      weight = random_.pick(same_dtype);
      block.register_parameter("weight", weight, weight.requires_grad());
    } else {
      weight = add_parameter(block, "weight", {plan_.dim, plan_.dim}, 0.3);
      if (plan_.sharing) tied_.push_back(weight);
    }
    const auto bias = add_parameter(block, "bias", {plan_.dim}, 0.1);
    return [weight, bias](const at::Tensor& x, const Batch&) { return at::linear(x, weight, bias).tanh(); };
  }

  /// A parameter of another module, used without being registered here, in one operator with an own one.
  Block::Body borrow(Block& block) {
    const auto own = add_parameter(block, "own", {plan_.dim, plan_.dim}, 0.2);
    const auto same_dtype = tied_weights();
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

  /// Some ranks use parameters that others do not, of a unit that all use: a factor, and an embedding.
  Block::Body some_by_rank(Block& block) {
    auto always = add(block, "local_always", torch::nn::Linear(plan_.dim, plan_.dim), /*may_freeze=*/false);
    auto table = add(block, "local_table", torch::nn::Embedding(plan_.vocab, plan_.dim), /*may_freeze=*/false);
    const auto sometimes = block.register_parameter("sometimes", at::ones({plan_.dim}, leaf_dtype_));
    return [always, table, sometimes](const at::Tensor& x, const Batch& batch) mutable {
      const auto y = always(x);
      if (batch.part % 3 == 1) return y + 0.1 * table(batch.tokens);
      return batch.part % 2 == 0 ? y * sometimes : y;
    };
  }

  /// A parameter that is used through views.
  Block::Body views(Block& block) {
    const auto dim = plan_.dim;
    const auto packed = add_parameter(block, "packed", {3 * dim, dim}, 0.2);
    const auto row = random_.below(3 * dim);
    using Body = Block::Body;
    const std::vector<Body> bodies = {
        [packed](const at::Tensor& x, const Batch&) {
          const auto parts = packed.chunk(3);
          return at::linear(at::linear(x, parts[0]).tanh(), parts[2]);
        },
        [packed, dim](const at::Tensor& x, const Batch&) {
          const auto parts = packed.split_with_sizes({dim, 2 * dim});
          return at::linear(at::linear(x, parts[1]).tanh(), parts[1].t());
        },
        [packed, dim](const at::Tensor& x, const Batch&) {
          // Without an offset of its own, which may mean the parameter's element or the unit's.
          return at::linear(x, packed.narrow(0, 1, dim).as_strided({dim, dim}, {1, dim})).tanh();
        },
        [packed, row](const at::Tensor& x, const Batch&) {
          return x + packed.select(0, row).view({1, 1, -1}).expand_as(x);
        },
        [packed, dim](const at::Tensor& x, const Batch&) { return at::matmul(x, packed.t().narrow(1, 1, dim)).tanh(); },
        [packed, dim](const at::Tensor& x, const Batch& batch) {
          const auto parts = packed.view({3, dim, dim}).unbind(0);
          return at::linear(x, parts[batch.decision % 3] + parts[(batch.decision + 1) % 3].transpose(0, 1)).tanh();
        },
    };
    return random_.pick(bodies);
  }

  Block::Body untouched(Block& block) {
    add(block, "linear", torch::nn::Linear(plan_.dim, odd_size()));
    return [](const at::Tensor& x, const Batch&) { return x; };
  }

  ModelPlan plan_;
  Random random_;
  at::ScalarType leaf_dtype_ = at::kFloat;
  bool inside_optional_ = false;
  std::vector<BlockPtr> made_;  // finished, so that reusing one makes no cycle
  std::vector<at::Tensor> tied_;
};

}  // namespace fsdp::testing
