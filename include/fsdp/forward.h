#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "fsdp/fsdp_module.h"

namespace fsdp {

namespace detail {

/// Converts floating-point tensors, alone or in tuples, pairs and vectors, to another dtype. Returns everything else unchanged, undefined
/// tensors included.
template <typename T>
T converted(T value, at::ScalarType dtype) {
  return value;
}
inline at::Tensor converted(at::Tensor value, at::ScalarType dtype) {
  return value.defined() && value.is_floating_point() ? value.to(dtype) : value;
}
template <typename T>
std::vector<T> converted(std::vector<T> values, at::ScalarType dtype) {
  for (auto& value : values) value = converted(std::move(value), dtype);
  return values;
}
template <typename First, typename Second>
std::pair<First, Second> converted(std::pair<First, Second> values, at::ScalarType dtype) {
  return {converted(std::move(values.first), dtype), converted(std::move(values.second), dtype)};
}
template <typename... Ts>
std::tuple<Ts...> converted(std::tuple<Ts...> values, at::ScalarType dtype) {
  return std::apply([&](auto&... each) { return std::tuple<Ts...>(converted(std::move(each), dtype)...); }, values);
}

template <typename Contained>
Contained& module_of(const torch::nn::ModuleHolder<Contained>& holder) {
  return *holder.ptr();
}
template <typename Module>
Module& module_of(const std::shared_ptr<Module>& module) {
  return *module;
}
template <typename Module, typename = std::enable_if_t<std::is_base_of_v<torch::nn::Module, Module>>>
Module& module_of(Module& module) {
  return module;
}

}  // namespace detail

/// Calls module.forward(inputs...) with the conversions of a mixed precision policy. Floating-point inputs are converted to its param_dtype
/// (if cast_forward_inputs is set), and floating-point outputs to its output_dtype. C++ modules have no hooks that could do this. `module`
/// is a unit of a sharded model, as holder, shared pointer or reference. Without a policy, this is plain forward. Throws Error if the
/// module is not a unit.
template <typename Module, typename... Inputs>
auto forward(Module&& module, Inputs&&... inputs) {
  auto& target = detail::module_of(module);
  const auto policy = handle(target).mixed_precision();
  const auto input_dtype = policy && policy->cast_forward_inputs ? policy->param_dtype : std::nullopt;
  auto output = [&] {
    if (!input_dtype) return target.forward(std::forward<Inputs>(inputs)...);
    return target.forward(detail::converted(std::decay_t<Inputs>(std::forward<Inputs>(inputs)), *input_dtype)...);
  }();
  if (!policy || !policy->output_dtype) return output;
  return detail::converted(std::move(output), *policy->output_dtype);
}

}  // namespace fsdp
