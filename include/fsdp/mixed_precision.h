#pragma once

#include <c10/core/ScalarType.h>

#include <optional>

namespace fsdp {

/// The dtypes of a floating-point parameter's life. Where one is left out, the parameter's own (or the one named) is taken. Source: FSDP2's
/// MixedPrecisionPolicy (param_dtype, reduce_dtype, output_dtype, cast_forward_inputs) and Megatron-FSDP's (main_params_dtype,
/// main_grads_dtype, grad_comm_dtype), as one.
struct MixedPrecisionPolicy {
  /// In which forward and backward compute: the dtype that the module's parameters have once it is sharded. Else their own.
  std::optional<at::ScalarType> param_dtype = {};
  /// Of the main parameters, which the optimizer updates, and its state. Without a value: the parameter's own.
  /// Frozen parameters always keep their own: they are stored once.
  std::optional<at::ScalarType> main_params_dtype = at::kFloat;
  /// Of the main gradients, in which the gradients of several backwards are added up. Else main_params_dtype.
  std::optional<at::ScalarType> main_grads_dtype = {};
  /// In which gradients travel (FSDP2's reduce_dtype). Whatever it is, sums run in fp32 (fp64 for double). Else main_grads_dtype.
  std::optional<at::ScalarType> grad_comm_dtype = {};
  /// To which fsdp::forward converts floating-point outputs. Else they stay as they are.
  std::optional<at::ScalarType> output_dtype = {};
  /// fsdp::forward converts floating-point inputs to param_dtype.
  bool cast_forward_inputs = true;
};

}  // namespace fsdp
