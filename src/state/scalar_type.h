#pragma once

#include <c10/core/ScalarType.h>

#include <string>

#include "checkpoint/dtype.h"

namespace fsdp::state {

/// The file formats' name of a tensor's dtype, and back. Throw Error, which names the tensor `what`, for dtypes that the other side has
/// not.
ckpt::Dtype dtype_of(at::ScalarType type, const std::string& what);
at::ScalarType scalar_type_of(ckpt::Dtype dtype, const std::string& what);
/// Whether values of it become another floating-point dtype where one is asked for: all but float4_e2m1fn_x2, two numbers in an element.
bool is_convertible(at::ScalarType type);

}  // namespace fsdp::state
