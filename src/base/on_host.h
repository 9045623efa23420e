#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace fsdp {

/// The values of tensors without dimensions, of one dtype, on the CPU or on one device: a 1-D tensor on the CPU. The host waits once for
/// the device, if any is there.
at::Tensor on_host(std::vector<at::Tensor> values, at::ScalarType dtype);

}  // namespace fsdp
