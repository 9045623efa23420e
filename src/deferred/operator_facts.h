#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <initializer_list>
#include <string_view>

// Facts about operators that recording needs, and that schemas and tags do not state.
namespace fsdp::deferred {

inline bool is_one_of(std::string_view name, std::initializer_list<std::string_view> names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

/// True for operators that fill a tensor with random numbers. The shape alone determines how many numbers they draw, and the previous
/// contents do not matter.
inline bool is_random_fill(const c10::OperatorHandle& op) {
  const auto& [name, overload] = op.operator_name();
  return is_one_of(name, {"aten::normal_", "aten::uniform_", "aten::random_", "aten::exponential_", "aten::geometric_", "aten::cauchy_",
                          "aten::log_normal_"}) ||
         (name == "aten::bernoulli_" && overload == "float");
}

/// True for operators that read the shapes, dtypes and layouts of their arguments, but not the values.
inline bool takes_shape_only(const c10::OperatorHandle& op) {
  const std::string_view name = op.operator_name().name;
  return is_one_of(name, {"aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::rand_like", "aten::randn_like",
                          "aten::randint_like", "aten::new_zeros", "aten::new_ones", "aten::new_full"});
}

/// True for operators that overwrite all of their first argument.
inline bool overwrites(const c10::OperatorHandle& op) {
  return is_random_fill(op) || is_one_of(op.operator_name().name, {"aten::zero_", "aten::fill_", "aten::copy_"});
}

/// True for operators that make a tensor with undefined contents.
inline bool makes_undefined(const c10::OperatorHandle& op) {
  const std::string_view name = op.operator_name().name;
  return name.starts_with("aten::empty") || name.starts_with("aten::new_empty");
}

/// True for operators that make tensors from no other tensors, on a device that the caller chooses. (aten::from_file is not one of them:
/// its result counts as a tensor from outside.)
inline bool is_factory(const c10::OperatorHandle& op) {
  const auto& arguments = op.schema().arguments();
  return op.operator_name().name != "aten::from_file" &&
         std::any_of(arguments.begin(), arguments.end(), [](const auto& argument) { return argument.name() == "device"; });
}

inline bool has_tensors(const c10::Type& type) {
  if (type.kind() == c10::TypeKind::TensorType) return true;
  const auto contained = type.containedTypes();
  return std::any_of(contained.begin(), contained.end(), [](const auto& inner) { return has_tensors(*inner); });
}

inline bool returns_tensors(const c10::OperatorHandle& op) {
  const auto& returns = op.schema().returns();
  return std::any_of(returns.begin(), returns.end(), [](const auto& result) { return has_tensors(*result.type()); });
}

}  // namespace fsdp::deferred
