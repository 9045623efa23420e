#include "base/tensor_over.h"

#include <ATen/ops/from_blob.h>

namespace fsdp {

at::Tensor tensor_over(void* bytes, at::IntArrayRef shape, const at::TensorOptions& options, const std::function<void(void*)>& release) {
  // Without the device, torch would ask the driver whose memory it is; of a null pointer that is nobody's.
  return at::from_blob(bytes, shape, release, options, options.device());
}

}  // namespace fsdp
