#include "base/tensor_over.h"

#include <c10/core/Allocator.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include <utility>

namespace fsdp {

// As from_blob(), in half of its time. The device is given, because torch would otherwise ask the driver to which device the memory belongs,
// and fail for a null pointer.
at::Tensor tensor_over(void* bytes, at::IntArrayRef shape, const at::TensorOptions& options, const std::function<void(void*)>& release) {
  auto memory = c10::InefficientStdFunctionContext::makeDataPtr(bytes, release, options.device());
  const auto size = static_cast<std::size_t>(c10::multiply_integers(shape)) * options.dtype().itemsize();
  c10::Storage storage(
      c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), size, std::move(memory), nullptr, /*resizable=*/false));
  const c10::DispatchKeySet keys(options.computeDispatchKey());
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, options.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(shape);
  return tensor;
}

}  // namespace fsdp
