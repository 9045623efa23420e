#include "base/any_strides.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace fsdp {
namespace {

/// True if several elements may lie in the same place.
bool overlaps(const at::Tensor& tensor) {
  std::vector<std::pair<std::int64_t, std::int64_t>> dims;  // stride, size
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) dims.emplace_back(tensor.stride(dim), tensor.size(dim));
  std::sort(dims.begin(), dims.end());
  std::int64_t farthest = 0;  // the farthest position that the narrower dimensions reach
  for (const auto& [stride, size] : dims) {
    if (size <= 1) continue;
    if (stride <= farthest) return true;
    farthest += (size - 1) * stride;
  }
  return false;
}

}  // namespace

at::Tensor row_major(const at::Tensor& tensor) { return tensor.detach().resolve_conj().resolve_neg().contiguous(); }

void assign_values(const at::Tensor& to, const at::Tensor& values) {
  const at::NoGradGuard no_grad;
  // Elements that are expanded along a dimension are written once.
  auto place = to.detach();
  auto written = values.view(to.sizes());
  for (std::int64_t dim = 0; dim < place.dim(); ++dim) {
    if (place.stride(dim) != 0 || place.size(dim) <= 1) continue;
    place = place.narrow(dim, 0, 1);
    written = written.narrow(dim, 0, 1);
  }
  if (to.numel() == 0 ||
      (!overlaps(place) && (written.numel() == values.numel() || at::equal(written.expand(to.sizes()), values.view(to.sizes()))))) {
    place.copy_(written);
  } else {
    at::Tensor handle = to;
    handle.set_data(values.view(to.sizes()).to(to.options()).clone());
  }
}

}  // namespace fsdp
