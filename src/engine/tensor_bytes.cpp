#include "engine/tensor_bytes.h"

#include <ATen/ATen.h>
#include <c10/core/DispatchKeySet.h>

#include <cstring>

#include "base/parallel_copy.h"

namespace fsdp::engine {

void zero_bytes(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return;  // It may have no address.
  if (tensor.is_cpu()) {
    std::memset(tensor.data_ptr(), 0, tensor.nbytes());
  } else {
    tensor.zero_();
  }
}

bool copy_bytes(const at::Tensor& source, const at::Tensor& target) {
  if (!target.is_cpu()) return false;
  // Of tensors of other kinds (subclasses, lazy conjugates, other layouts) the bytes are not the values.
  constexpr auto kOfEveryTensor = c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset;
  if (source.key_set() - kOfEveryTensor != target.key_set() - kOfEveryTensor) return false;
  if (source.scalar_type() != target.scalar_type() || source.sizes() != target.sizes() || !source.is_contiguous()) return false;
  parallel_copy(target.data_ptr(), source.const_data_ptr(), static_cast<std::int64_t>(target.nbytes()));
  return true;
}

}  // namespace fsdp::engine
