#include "export/adapters.h"

#include <ATen/ATen.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "comm/parts.h"
#include "engine/buffer.h"
#include "layout/unit_layout.h"
#include "memory/device_memory.h"
#include "memory/slot_storage.h"

namespace fsdp::weights {
namespace {

/// Elements that are computed at once, or a row if that has more: the temporaries stay small, however large the tensor is.
constexpr std::int64_t kAtOnce = std::int64_t{1} << 18;

/// This rank's part of a matrix: consecutive elements, row by row, of some of its columns.
struct OwnElements {
  std::int64_t begin = 0;  ///< Its first element, in these columns, flattened.
  std::int64_t first_column = 0;
  std::int64_t columns = 0;
};

OwnElements own_elements_of(const Entry& entry) {
  OwnElements mine{.columns = entry.shape[1]};
  if (!entry.is_cut()) return mine;
  const auto& unit = *entry.unit;
  const auto begins = begins_by_rank(entry);
  mine.begin = begins[static_cast<std::size_t>(unit.main_pieces().first)];
  if (entry.cut == 0) return mine;
  mine.begin -= begins[static_cast<std::size_t>(unit.inner_pieces().first)];
  mine.columns /= unit.communicators.gather->size();
  mine.first_column = mine.columns * unit.communicators.gather->rank();
  return mine;
}

std::int64_t rows_at_once(const OwnElements& mine) { return std::max<std::int64_t>(1, kAtOnce / std::max<std::int64_t>(mine.columns, 1)); }

/// The elements of a factor, whose bytes are `whole`, as bytes.
at::Tensor bytes_of(const at::Tensor& whole, Range range, std::int64_t itemsize) {
  return comm::flat_view(whole, range.begin * itemsize, range.size * itemsize);
}

}  // namespace

Adapters::Adapters(std::vector<Entry> factors, const DeviceMesh& mesh) : factors_(std::move(factors)), device_(mesh.device()) {
  routes_.emplace(mesh, /*receives=*/true);
  courses_ = courses_of(factors_, *routes_);
}

std::int64_t Adapters::hold(std::span<const Entry* const> entries) {
  std::map<std::size_t, std::int64_t> begins;
  std::int64_t size = 0;
  std::int64_t temporaries = 0;
  for (const auto* entry : entries) {
    for (const auto& product : entry->added) {
      for (const auto factor : {product.up, product.down}) {
        if (!begins.emplace(factor, size).second) continue;
        const auto& own = factors_[factor].own;
        size += aligned(c10::multiply_integers(factors_[factor].shape) * static_cast<std::int64_t>(own.itemsize()));
      }
    }
    const auto mine = own_elements_of(*entry);
    const auto rows = std::min(rows_at_once(mine), entry->shape[0]);
    const auto sums = 2 * rows * mine.columns * static_cast<std::int64_t>(c10::elementSize(computes_in(*entry)));
    temporaries = std::max(temporaries, sums);
  }
  if (begins.empty()) return 0;
  memory_ = memory::allocate_shareable(device_, size);
  const auto storage = memory::empty_storage(device_);
  memory::attach(*storage.unsafeGetStorageImpl(), memory_.get(), size);
  for (const auto& [index, begin] : begins) {
    const auto& factor = factors_[index];
    const auto numel = c10::multiply_integers(factor.shape);
    const auto whole = engine::view_of(storage, at::kByte, begin, {numel * static_cast<std::int64_t>(factor.own.itemsize())});
    const auto own = bytes_of(whole, courses_[index].ranges.front(), static_cast<std::int64_t>(factor.own.itemsize()));
    if (own.numel() > 0) own.view(factor.own.scalar_type()).view(factor.own.sizes()).copy_(factor.own);
    held_.emplace(index, whole);
  }
  bytes_ = size + temporaries;
  return bytes_;
}

void Adapters::gather(const comm::Label& label) {
  for (const auto& route : routes_->all()) {
    for (std::size_t k = 0; k < route->rows.size(); ++k) {
      std::vector<comm::UnevenPart> parts;
      for (const auto& [index, whole] : held_) {
        const auto& course = courses_[index];
        if (course.route != route.get()) continue;
        const auto itemsize = static_cast<std::int64_t>(factors_[index].own.itemsize());
        parts.push_back(
            {.whole = bytes_of(whole, course.ranges[k + 1], itemsize), .own = bytes_of(whole, course.ranges[k], itemsize), .bytes = {}});
        for (const auto numel : course.numel[k]) parts.back().bytes.push_back(numel * itemsize);
      }
      const auto& row = route->rows[k];
      if (!parts.empty()) row.ranks->gather_uneven(parts, row.receives, label)->wait();
    }
  }
}

void Adapters::put_in_order() {
  for (const auto& [index, bytes] : held_) {
    const auto& factor = factors_[index];
    if (arrives_in_order(nullptr, factor.cut_by_unit(), factor.shape)) continue;
    const auto values = whole(index);
    assemble(nullptr, factor.cut_by_unit(), values.flatten().clone(), values);
  }
}

at::Tensor Adapters::whole(std::size_t factor) const {
  const auto& entry = factors_[factor];
  return held_.at(factor).view(entry.own.scalar_type()).view(entry.shape);
}

at::ScalarType Adapters::computes_in(const Entry& entry) const {
  auto dtype = c10::promoteTypes(at::kFloat, entry.own.scalar_type());
  for (const auto& product : entry.added) {
    for (const auto factor : {product.up, product.down}) dtype = c10::promoteTypes(dtype, factors_[factor].own.scalar_type());
  }
  return dtype;
}

void Adapters::merge(const at::Tensor& to, const Entry& entry) const {
  const auto own = entry.own.reshape({-1});
  const auto [begin, first_column, columns] = own_elements_of(entry);
  const auto rows = rows_at_once({begin, first_column, columns});
  const auto dtype = computes_in(entry);
  for (std::int64_t done = 0; done < own.numel();) {
    const auto first_row = (begin + done) / columns;
    const auto end = std::min(own.numel(), (first_row + rows) * columns - begin);
    const auto end_row = (begin + end + columns - 1) / columns;
    const auto sum = own.narrow(0, done, end - done).to(at::TensorOptions(device_).dtype(dtype), /*non_blocking=*/false, /*copy=*/true);
    for (const auto& product : entry.added) {
      const auto left = product.transposed ? whole(product.down).t() : whole(product.up);
      const auto right = product.transposed ? whole(product.up).t() : whole(product.down);
      const auto part = at::mm(left.narrow(0, first_row, end_row - first_row).to(dtype), right.narrow(1, first_column, columns).to(dtype));
      sum.add_(part.mul_(product.scale).view({-1}).narrow(0, begin + done - first_row * columns, end - done));
    }
    to.narrow(0, done, end - done).copy_(sum);
    done = end;
  }
}

std::int64_t Adapters::release() {
  held_.clear();
  memory_ = {};
  return std::exchange(bytes_, 0);
}

}  // namespace fsdp::weights
