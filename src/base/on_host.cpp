#include "base/on_host.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace fsdp {

at::Tensor on_host(std::vector<at::Tensor> values, at::ScalarType dtype) {
  if (values.empty()) return at::empty({0}, dtype);
  const auto elsewhere = std::find_if(values.begin(), values.end(), [](const at::Tensor& value) { return !value.is_cpu(); });
  if (elsewhere != values.end()) {
    const auto device = elsewhere->device();
    for (auto& value : values) value = value.to(device, /*non_blocking=*/true);
  }
  return at::stack(values).to(at::kCPU, dtype);
}

}  // namespace fsdp
