#include "replay/digest.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "base/integer_dtype_of.h"
#include "engine/tensor_bytes.h"

namespace fsdp::replay {
namespace {

/// Elements that are widened to eight bytes at a time, so that a digest takes little memory.
constexpr std::int64_t kWidened = std::int64_t{1} << 20;

/// On the device: the sum of the elements' bits, each multiplied by an odd number that depends on its place. A flipped bit changes it,
/// because odd numbers have inverses modulo 2^64.
std::vector<std::int64_t> digests_by_operators(const at::Tensor& tensor, std::int64_t pieces) {
  const auto rows = tensor.view(integer_dtype_of(tensor.itemsize())).view({pieces, -1});
  const auto width = std::max<std::int64_t>(kWidened / pieces, 1);
  auto sums = at::zeros({pieces}, rows.options().dtype(at::kLong));
  for (std::int64_t at = 0; at < rows.size(1); at += width) {
    const auto columns = rows.narrow(1, at, std::min(width, rows.size(1) - at)).to(at::kLong);
    const auto weights = at::arange(at, at + columns.size(1), sums.options()).mul_(2).add_(1);
    sums.add_(columns.mul_(weights).sum(1));
  }
  const auto host = sums.cpu();
  const auto* values = host.const_data_ptr<std::int64_t>();
  return {values, values + pieces};
}

}  // namespace

std::vector<std::int64_t> digests(const at::Tensor& tensor, std::int64_t pieces) {
  if (tensor.numel() == 0) return std::vector<std::int64_t>(static_cast<std::size_t>(pieces), 0);
  if (!tensor.is_cpu()) return digests_by_operators(tensor, pieces);
  const auto numel = tensor.numel() / pieces;
  std::vector<std::int64_t> found;
  for (std::int64_t piece = 0; piece < pieces; ++piece) found.push_back(engine::checksum(tensor.narrow(0, piece * numel, numel)));
  return found;
}

std::int64_t digest(const at::Tensor& tensor) { return digests(tensor.detach().contiguous().view({-1}), 1).front(); }

std::int64_t with_digest(std::int64_t whole, std::int64_t digest, std::size_t position) {
  auto mixed = static_cast<std::uint64_t>(digest) ^ (static_cast<std::uint64_t>(position) + 1) * 0x9e3779b97f4a7c15U;
  mixed = (mixed ^ mixed >> 31) * 0xbf58476d1ce4e5b9U;  // invertible, so that another digest gives another sum
  return static_cast<std::int64_t>(static_cast<std::uint64_t>(whole) + (mixed ^ mixed >> 29));
}

}  // namespace fsdp::replay
