#pragma once

#include <c10/core/ScalarType.h>

#include <optional>

namespace fsdp {

/// The dtypes in which a floating-point parameter and its gradient are kept, computed with and sent. The options are those of FSDP2's
/// MixedPrecisionPolicy (param_dtype, reduce_dtype, output_dtype, cast_forward_inputs) and of Megatron-FSDP's (main_params_dtype,
/// main_grads_dtype, grad_comm_dtype).
struct MixedPrecisionPolicy {
  /// The dtype in which forward and backward compute. The module's parameters have it once the module is sharded. By default, each
  /// parameter keeps its own dtype. Inputs must have this dtype, too; fsdp::forward converts them.
  std::optional<at::ScalarType> param_dtype = {};
  /// The dtype of the main parameters, which the optimizer updates, and of its state. Without a value, it is the parameter's own. Frozen
  /// parameters always keep their own dtype, because they are stored once.
  std::optional<at::ScalarType> main_params_dtype = at::kFloat;
  /// The dtype of the main gradients, in which the gradients of several backwards are added up. By default main_params_dtype.
  std::optional<at::ScalarType> main_grads_dtype = {};
  /// The dtype in which gradients are sent (FSDP2's reduce_dtype). Sums always run in fp32 (fp64 for double). By default main_grads_dtype.
  std::optional<at::ScalarType> grad_comm_dtype = {};
  /// The dtype to which fsdp::forward converts floating-point outputs. By default they are not converted.
  std::optional<at::ScalarType> output_dtype = {};
  /// Whether fsdp::forward converts floating-point inputs to param_dtype.
  bool cast_forward_inputs = true;
};

}  // namespace fsdp
