#include "engine/tensor_bytes.h"

#include <ATen/ATen.h>
#include <c10/core/DispatchKeySet.h>

#include <algorithm>
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
  // For other kinds of tensors (subclasses, lazy conjugates, other layouts), the bytes are not the values.
  constexpr auto kOfEveryTensor = c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset;
  if (source.key_set() - kOfEveryTensor != target.key_set() - kOfEveryTensor) return false;
  if (source.scalar_type() != target.scalar_type() || source.sizes() != target.sizes() || !source.is_contiguous()) return false;
  parallel_copy(target.data_ptr(), source.const_data_ptr(), static_cast<std::int64_t>(target.nbytes()));
  return true;
}

std::int64_t checksum(const at::Tensor& tensor, std::int64_t elements) {
  // Operators are avoided if possible, because dispatch modes that observe operators should not see these.
  const auto step = elements == 0 ? 1 : std::max<std::int64_t>(tensor.numel() / elements, 1);
  const bool is_readable = tensor.is_cpu() && tensor.is_contiguous();
  // From a device, only elements that are summed are copied.
  const auto read = is_readable ? tensor
                    : step == 1 ? tensor.detach().cpu().contiguous()
                                : tensor.detach().reshape({-1}).slice(0, 0, tensor.numel(), step).cpu().contiguous();
  const auto* bytes = static_cast<const char*>(read.const_data_ptr());
  constexpr std::size_t kWord = sizeof(std::uint64_t);
  std::uint64_t sum = tensor.nbytes();
  const auto add = [&](const char* from, std::size_t count) {
    std::uint64_t word = 0;
    std::memcpy(&word, from, count);
    sum = (sum ^ word) * 0x9e3779b97f4a7c15U;  // odd: no two words give the same sum
    sum ^= sum >> 32;
  };
  const std::size_t itemsize = read.itemsize();
  // All words, or only those of elements at a distance of `step`.
  const std::size_t width = step == 1 ? kWord : std::min(kWord, itemsize);
  const std::size_t stride = step == 1 ? kWord : (is_readable ? static_cast<std::size_t>(step) : 1) * itemsize;
  for (std::size_t at = 0; at < read.nbytes(); at += stride) add(bytes + at, std::min(width, read.nbytes() - at));
  return sum == 0 ? 1 : static_cast<std::int64_t>(sum);
}

}  // namespace fsdp::engine
