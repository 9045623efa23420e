#include "export/changed_boxes.h"

#include <ATen/ATen.h>

#include <limits>

#include "base/integer_dtype_of.h"
#include "export/weight_changes.h"
#include "fsdp/error.h"

namespace fsdp::weights {
namespace {

constexpr std::int64_t kLargestElement = 8;  // bytes; larger ones travel whole
constexpr auto kPositionBytes = static_cast<std::int64_t>(sizeof(std::int32_t));

/// A copy of bytes, which may lie anywhere, as values.
at::Tensor copied(const at::Tensor& bytes, at::ScalarType dtype) { return bytes.clone().view(dtype); }

}  // namespace

std::int64_t travelling_bytes(const SentBox& box, ChangedCount count) {
  if (count == kAllOfIt) return box.bytes();
  return count * (kPositionBytes + static_cast<std::int64_t>(c10::elementSize(box.dtype)));
}

ChangedCount count_changed(const SentBox& box, const at::Tensor& values, const at::Tensor& saved) {
  const auto counted = changed_elements(values.view({-1}), saved).count_nonzero().item<std::int64_t>();
  if (counted == 0) return 0;
  if (counted > std::numeric_limits<ChangedCount>::max() || values.itemsize() > kLargestElement) return kAllOfIt;
  const auto count = static_cast<ChangedCount>(counted);
  const bool are_counted = values.numel() <= std::numeric_limits<std::int32_t>::max();
  return are_counted && travelling_bytes(box, count) < box.bytes() ? count : kAllOfIt;
}

void pack_changes(const at::Tensor& values, at::Tensor& saved, ChangedCount count, const at::Tensor& bytes) {
  if (count == 0) return;
  const auto flat = values.view({-1});
  const auto places = changed_elements(flat, saved).nonzero().view({-1});
  if (places.numel() != count) throw Error("transfer_plan: something writes to the weights while they are sent; run between steps");
  const auto new_bits = bits(flat).index_select(0, places);
  bits(saved).index_copy_(0, places.to(saved.device()), new_bits.to(saved.device()));
  const auto border = count * kPositionBytes;
  bytes.narrow(0, 0, border).copy_(places.to(at::kInt).view(at::kByte));
  bytes.narrow(0, border, bytes.numel() - border).copy_(new_bits.view({-1}).view(at::kByte));
}

void place_changes(const SentBox& box, ChangedCount count, const at::Tensor& bytes, const ckpt::Box& common, const at::Tensor& into) {
  if (count == 0) return;
  const auto border = count * kPositionBytes;
  auto rest = copied(bytes.narrow(0, 0, border), at::kInt).to(at::kLong);
  const auto new_bits = copied(bytes.narrow(0, border, bytes.numel() - border), integer_dtype_of(c10::elementSize(box.dtype)));
  std::vector<at::Tensor> indices(box.box.sizes.size());  // in `into`, by dimension
  auto is_there = at::ones_like(rest, at::kBool);
  for (std::size_t d = indices.size(); d-- > 0;) {
    const auto first = common.offsets[d] - box.box.offsets[d];
    const auto index = rest.remainder(box.box.sizes[d]) - first;
    rest = rest.div(box.box.sizes[d], "floor");
    is_there.logical_and_(index.ge(0)).logical_and_(index.lt(common.sizes[d]));
    indices[d] = index;
  }
  c10::List<std::optional<at::Tensor>> chosen;
  for (const auto& index : indices) chosen.push_back(index.masked_select(is_there).to(into.device()));
  const auto values = new_bits.masked_select(is_there).to(into.device());
  if (into.scalar_type() == box.dtype) {
    into.view(values.scalar_type()).index_put_(chosen, values);
  } else {
    into.index_put_(chosen, values.view(box.dtype).to(into.scalar_type()));
  }
}

}  // namespace fsdp::weights
