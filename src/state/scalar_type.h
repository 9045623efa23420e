#pragma once

#include <c10/core/ScalarType.h>

#include <string>

#include "checkpoint/dtype.h"

namespace fsdp::state {

/// Convert torch's dtypes to those of the file formats, and back. Throw Error, which names the tensor `what`, for dtypes that the other
/// side does not have.
ckpt::Dtype dtype_of(at::ScalarType type, const std::string& what);
at::ScalarType scalar_type_of(ckpt::Dtype dtype, const std::string& what);
/// True if values of this floating-point dtype can be converted to another one. This holds for all except float4_e2m1fn_x2, which has two
/// numbers in an element.
bool is_convertible(at::ScalarType type);

}  // namespace fsdp::state
