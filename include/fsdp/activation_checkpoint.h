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

/// Options of activation_checkpoint().
struct ActivationCheckpointOptions {
  /// True: random operators (dropout) draw the same numbers again when `fn` is repeated. For this, the states of the CPU's generator and of
  /// the current accelerator's are kept for each call, 5 KB on the CPU. Set it to false if `fn` draws no random numbers.
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

/// Activation checkpointing: returns fn(inputs...), but keeps only the inputs, and frees the tensors that autograd saves inside of `fn`. In
/// backward, `fn` runs a second time on the inputs, and its own backward follows at once. So only one part of the model has its activations
/// in memory at a time, at the cost of a second forward (Chen et al., 2016):
///
///     for (auto& block : blocks) x = fsdp::activation_checkpoint(block, x);  // a module's holder is a function
///     x = fsdp::activation_checkpoint([block, mask](const at::Tensor& x) { return block->forward(x, mask); }, x);
///
/// `fn` takes any number of at::Tensor or std::vector<at::Tensor>, and returns an at::Tensor, a std::vector<at::Tensor> or a std::tuple of
/// at::Tensor. Tensors may be undefined. `fn` is copied and kept until backward is done, so capture modules by their holders, not by a
/// `this` that may not live as long. It must compute the same both times. So it must not use a random generator of its own, nor state that
/// it changes (the running statistics of a layer are updated twice).
///
/// Gradients have the same bits as without activation checkpointing, except that the gradients of a tensor that is used in several places
/// may be added in another order. This applies to inputs, to parameters that `fn` uses, and to other tensors that it has captured, whether
/// or not an input requires a gradient. All of autograd works: backward(), grad(), several backwards through one graph, hooks, checkpoints
/// within checkpoints, autocast (whose cache of cast weights is not used inside of `fn`). Sharded models (fully_shard) work, too; their
/// units are gathered again for the repetition. Without grad mode, this only calls `fn`.
///
/// Backward throws torch's in-place error if an input was written since. It throws Error if a parameter was written since (by an optimizer
/// step, for example), if `fn` did something else the second time, or if create_graph is true, as the result can't be differentiated twice.
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

/// activation_checkpoint() with the default options.
template <typename Fn, detail::TensorOrTensors... Inputs>
auto activation_checkpoint(Fn fn, const Inputs&... inputs) {
  return activation_checkpoint(ActivationCheckpointOptions{}, std::move(fn), inputs...);
}

}  // namespace fsdp
