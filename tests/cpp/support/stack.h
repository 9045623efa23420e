#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/fsdp.h"
#include "support/meshes.h"

// A model whose every unit, touch and gradient a test can name: blocks of different sizes between an entry and a head that belong to the
// root. Its blocks tell an observer when they compute, forward and backward.
namespace fsdp::testing {

struct StackOptions {
  std::int64_t width = 10;
  std::vector<std::int64_t> hidden = {13, 7, 22, 16};  ///< One block each.
  bool checkpoint = false;                             ///< Blocks compute twice instead of keeping what autograd saves.
  bool nested = false;                                 ///< Pairs of blocks become units within units.
};

/// "forward blocks.1" before the block's operators, "backward blocks.1" before their gradients.
using Observer = std::function<void(const std::string& event)>;

struct StackBlockImpl : torch::nn::Module {
  StackBlockImpl(std::int64_t width, std::int64_t hidden)
      : up(register_module("up", torch::nn::Linear(width, hidden))), down(register_module("down", torch::nn::Linear(hidden, width))) {}
  at::Tensor forward(const at::Tensor& x) { return x + down(torch::tanh(up(x))); }
  torch::nn::Linear up;
  torch::nn::Linear down;
};
TORCH_MODULE(StackBlock);

/// Two blocks and a gain of its own, which it uses before and after them.
struct StackPairImpl : torch::nn::Module {
  StackPairImpl(std::int64_t width, std::int64_t hidden)
      : gain(register_parameter("gain", torch::randn({width}))),
        first(register_module("first", StackBlock(width, hidden))),
        second(register_module("second", StackBlock(width, hidden + 1))) {}
  at::Tensor gain;
  StackBlock first;
  StackBlock second;
};
TORCH_MODULE(StackPair);

struct StackImpl : torch::nn::Module {
  explicit StackImpl(StackOptions options_ = {})
      : options(std::move(options_)),
        entry(register_module("entry", torch::nn::Linear(3, options.width))),
        blocks(register_module("blocks", torch::nn::ModuleList())),
        head(register_module("head", torch::nn::Linear(options.width, 2))) {
    for (const auto hidden : options.hidden) {
      if (options.nested) {
        blocks->push_back(StackPair(options.width, hidden));
      } else {
        blocks->push_back(StackBlock(options.width, hidden));
      }
    }
  }

  at::Tensor run(StackBlockImpl& block, const std::string& name, const at::Tensor& x) const {
    if (options.checkpoint) return fsdp::activation_checkpoint([&block](const at::Tensor& input) { return block.forward(input); }, x);
    if (!observer) return block.forward(x);
    observer("forward " + name);
    auto y = block.forward(x);
    if (y.requires_grad()) {
      y.register_hook([observe = observer, name](const at::Tensor&) { observe("backward " + name); });
    }
    return y;
  }

  /// Through the blocks of `order`, by default all of them.
  at::Tensor forward(at::Tensor x, std::vector<std::size_t> order = {}) {
    if (order.empty()) {
      for (std::size_t k = 0; k < blocks->size(); ++k) order.push_back(k);
    }
    x = entry(x);
    for (const auto k : order) {
      const auto name = "blocks." + std::to_string(k);
      if (options.nested) {
        auto& pair = blocks->at<StackPairImpl>(k);
        x = run(*pair.first, name + ".first", x * pair.gain);
        x = run(*pair.second, name + ".second", x) * pair.gain;
      } else {
        x = run(blocks->at<StackBlockImpl>(k), name, x);
      }
    }
    return head(x);
  }

  StackOptions options;
  torch::nn::Linear entry;
  torch::nn::ModuleList blocks;
  torch::nn::Linear head;
  Observer observer;
};
TORCH_MODULE(Stack);

inline UnitPredicate stack_units() { return each<StackBlockImpl, StackPairImpl>(); }

/// The same weights on every rank.
inline Stack make_stack(StackOptions options = {}) {
  torch::manual_seed(11);
  return Stack(std::move(options));
}

/// This rank's input of a step.
inline at::Tensor stack_input(std::int64_t step, std::int64_t rank) {
  auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(100 * step + rank));
  return at::randn({4, 3}, generator);
}

inline at::Tensor stack_loss(Stack& model, std::int64_t step, std::int64_t rank, std::vector<std::size_t> order = {}) {
  return model->forward(stack_input(step, rank), std::move(order)).square().mean();
}

}  // namespace fsdp::testing
