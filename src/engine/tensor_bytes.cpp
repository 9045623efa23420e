#include "engine/tensor_bytes.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/DispatchKeySet.h>

#include <cstring>

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
  // So many elements and more, copy_ shares among threads.
  constexpr std::int64_t kLarge = at::internal::GRAIN_SIZE;
  if (!target.is_cpu() || target.numel() >= kLarge) return false;
  // Of tensors of other kinds (subclasses, lazy conjugates, other layouts) the bytes are not the values.
  constexpr auto kOfEveryTensor = c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset;
  if (source.key_set() - kOfEveryTensor != target.key_set() - kOfEveryTensor) return false;
  if (source.scalar_type() != target.scalar_type() || source.sizes() != target.sizes() || !source.is_contiguous()) return false;
  if (target.numel() > 0) std::memcpy(target.data_ptr(), source.const_data_ptr(), target.nbytes());
  return true;
}

}  // namespace fsdp::engine
