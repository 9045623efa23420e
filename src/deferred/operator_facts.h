#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <initializer_list>
#include <string_view>

// What recording knows of operators beyond their schemas and tags.
namespace fsdp::deferred {

inline bool is_one_of(std::string_view name, std::initializer_list<std::string_view> names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

/// Fills a tensor with random numbers. How many it draws depends on the shape alone, and nothing of what was there matters.
inline bool is_random_fill(const c10::OperatorHandle& op) {
  const auto& [name, overload] = op.operator_name();
  return is_one_of(name, {"aten::normal_", "aten::uniform_", "aten::random_", "aten::exponential_", "aten::geometric_", "aten::cauchy_",
                          "aten::log_normal_"}) ||
         (name == "aten::bernoulli_" && overload == "float");
}

/// Takes its arguments' shapes, dtypes and layouts, but not their values.
inline bool takes_shape_only(const c10::OperatorHandle& op) {
  const std::string_view name = op.operator_name().name;
  return is_one_of(name, {"aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::rand_like", "aten::randn_like",
                          "aten::randint_like", "aten::new_zeros", "aten::new_ones", "aten::new_full"});
}

/// Nothing of what was in its first argument remains.
inline bool overwrites(const c10::OperatorHandle& op) {
  return is_random_fill(op) || is_one_of(op.operator_name().name, {"aten::zero_", "aten::fill_", "aten::copy_"});
}

/// Makes a tensor whose contents are not defined.
inline bool makes_undefined(const c10::OperatorHandle& op) {
  const std::string_view name = op.operator_name().name;
  return name.starts_with("aten::empty") || name.starts_with("aten::new_empty");
}

/// Makes tensors from no others, on a device of the caller's choice. (A file's contents are outside tensors.)
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
