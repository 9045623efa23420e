#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <concepts>
#include <cstddef>
#include <functional>
#include <iterator>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace fsdp {

/// What activation_checkpoint() repeats.
struct ActivationCheckpointOptions {
  /// Random operators (dropout) draw the same numbers again when `fn` is repeated: the states of the CPU's generator and of the current
  /// accelerator's are kept per call, 5 KB on the CPU. False saves that where `fn` draws none.
  bool preserve_rng_state = true;
};

namespace detail {

/// What activation_checkpoint() does, for any signature.
using TensorFunction = std::function<std::vector<at::Tensor>(std::vector<at::Tensor> inputs)>;
std::vector<at::Tensor> activation_checkpoint(const ActivationCheckpointOptions& options, TensorFunction fn,
                                              std::vector<at::Tensor> inputs);

template <typename T>
concept TensorOrTensors = std::same_as<T, at::Tensor> || std::same_as<T, std::vector<at::Tensor>>;

inline void append(std::vector<at::Tensor>& all, const at::Tensor& one) { all.push_back(one); }
inline void append(std::vector<at::Tensor>& all, const std::vector<at::Tensor>& some) { all.insert(all.end(), some.begin(), some.end()); }

inline std::size_t count(const at::Tensor&) { return 1; }
inline std::size_t count(const std::vector<at::Tensor>& tensors) { return tensors.size(); }

/// The next `count` tensors of a list, as they were before append().
template <TensorOrTensors T>
T take(std::vector<at::Tensor>::iterator& position, std::size_t count) {
  const auto begin = position;
  position += static_cast<std::ptrdiff_t>(count);
  if constexpr (std::same_as<T, at::Tensor>) {
    return std::move(*begin);
  } else {
    return T(std::make_move_iterator(begin), std::make_move_iterator(position));
  }
}

template <typename T>
struct Results {
  static_assert(TensorOrTensors<T>, "a checkpointed function returns at::Tensor, std::vector<at::Tensor>, or a std::tuple of at::Tensor");
  static std::vector<at::Tensor> list(T result) {
    if constexpr (std::same_as<T, at::Tensor>) {
      return {std::move(result)};
    } else {
      return result;
    }
  }
  static T from(std::vector<at::Tensor> list) {
    if constexpr (std::same_as<T, at::Tensor>) {
      return std::move(list.front());
    } else {
      return list;
    }
  }
};

template <std::same_as<at::Tensor>... Tensors>
struct Results<std::tuple<Tensors...>> {
  static std::vector<at::Tensor> list(const std::tuple<Tensors...>& result) {
    return std::apply([](const auto&... tensors) { return std::vector<at::Tensor>{tensors...}; }, result);
  }
  static std::tuple<Tensors...> from(std::vector<at::Tensor> list) {
    return [&]<std::size_t... i>(std::index_sequence<i...>) { return std::tuple<Tensors...>(std::move(list[i])...); }
    (std::index_sequence_for<Tensors...>());
  }
};

}  // namespace detail

/// Activation checkpointing: returns fn(inputs...), but keeps nothing of what autograd saves inside of `fn`, only the inputs. When backward
/// arrives, `fn` runs a second time on them, and its own backward follows at once. Memory for one part of the model at a time, against one
/// more forward (Chen et al., 2016):
///
///     for (auto& block : blocks) x = fsdp::activation_checkpoint(block, x);  // a module's holder is a function
///     x = fsdp::activation_checkpoint([block, mask](const at::Tensor& x) { return block->forward(x, mask); }, x);
///
/// `fn` takes any number of at::Tensor or std::vector<at::Tensor>, of which some may be undefined, and returns an at::Tensor, a
/// std::vector<at::Tensor> or a std::tuple of at::Tensor, likewise. It is copied and kept until backward is done: capture modules by their
/// holders, not `this` of something that may go. It must do the same both times. That is so unless it depends on state that it changes
/// (what a layer counts or averages as it runs is counted twice) or on random numbers of a generator of its own.
///
/// Gradients are the same bits as without (where a tensor is used in several places, they may be added in another order),
/// of inputs, of parameters that `fn` uses, and of other tensors that it has captured, whether or not an input requires one. All of
/// autograd works: backward(), grad(), several backwards through one graph, hooks, checkpoints within checkpoints, autocast (whose cache of
/// cast weights is not used inside of `fn`); and so do sharded models (fully_shard), whose units are gathered again for the repetition.
/// Without grad mode this only calls `fn`.
///
/// Backward throws torch's in-place error if an input was written since, and Error if a parameter was (by an optimizer step, say), if `fn`
/// did something else the second time, or for create_graph = true: what is computed here can't be differentiated twice.
template <typename Fn, detail::TensorOrTensors... Inputs>
auto activation_checkpoint(ActivationCheckpointOptions options, Fn fn, const Inputs&... inputs) {
  using Result = std::remove_cvref_t<std::invoke_result_t<Fn&, Inputs...>>;
  std::vector<at::Tensor> list;
  (detail::append(list, inputs), ...);
  auto on_list = [fn = std::move(fn),
                  counts = std::array<std::size_t, sizeof...(Inputs)>{detail::count(inputs)...}](std::vector<at::Tensor> tensors) mutable {
    auto position = tensors.begin();
    auto arguments = [&]<std::size_t... i>(std::index_sequence<i...>) {
      return std::tuple<Inputs...>{detail::take<Inputs>(position, counts[i])...};  // Braces: from left to right.
    }
    (std::index_sequence_for<Inputs...>());
    return detail::Results<Result>::list(std::apply(fn, std::move(arguments)));
  };
  return detail::Results<Result>::from(detail::activation_checkpoint(options, std::move(on_list), std::move(list)));
}

/// The same with the default options.
template <typename Fn, detail::TensorOrTensors... Inputs>
auto activation_checkpoint(Fn fn, const Inputs&... inputs) {
  return activation_checkpoint(ActivationCheckpointOptions{}, std::move(fn), inputs...);
}

}  // namespace fsdp
