#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace fsdp {

/// Returns the values of scalar tensors (without dimensions) as a 1-D tensor of `dtype` on the CPU. The tensors lie on the CPU or on one
/// device. The host waits for that device once, if any tensor lies there.
at::Tensor on_host(std::vector<at::Tensor> values, at::ScalarType dtype);

}  // namespace fsdp
