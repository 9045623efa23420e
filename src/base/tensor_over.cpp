#include "base/tensor_over.h"

#include <ATen/ops/from_blob.h>

namespace fsdp {

at::Tensor tensor_over(void* bytes, at::IntArrayRef shape, const at::TensorOptions& options, const std::function<void(void*)>& release) {
  // The device is given, because torch would otherwise ask the driver to which device the memory belongs, and fail for a null pointer.
  return at::from_blob(bytes, shape, release, options, options.device());
}

}  // namespace fsdp
