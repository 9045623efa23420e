#include "checkpoint/boxes.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/text.h"
#include "fsdp/error.h"

namespace fsdp::ckpt {
namespace {

/// Appends the boxes of [begin, end), which is not empty, below the indices that `outer` fixes: `strides[d]` elements per index of d.
void append_boxes(std::span<const std::int64_t> shape, std::span<const std::int64_t> strides, Shape& outer, std::int64_t begin,
                  std::int64_t end, std::vector<Box>& boxes) {
  const std::size_t d = outer.size();
  const auto append_rows = [&](std::int64_t first, std::int64_t count) {
    Box box{Shape(shape.size(), 0), Shape(shape.begin(), shape.end())};
    std::copy(outer.begin(), outer.end(), box.offsets.begin());
    std::fill_n(box.sizes.begin(), d, 1);
    if (d < shape.size()) {
      box.offsets[d] = first;
      box.sizes[d] = count;
    }
    boxes.push_back(std::move(box));
  };
  if (d == shape.size()) return append_rows(0, 1);

  const std::int64_t stride = strides[d];
  const auto append_part_of_row = [&](std::int64_t row, std::int64_t from, std::int64_t to) {
    outer.push_back(row);
    append_boxes(shape, strides, outer, from, to, boxes);
    outer.pop_back();
  };
  std::int64_t row = begin / stride;
  const std::int64_t last = end / stride;
  if (begin % stride != 0) {
    append_part_of_row(row, begin % stride, std::min(end - row * stride, stride));
    ++row;
  }
  if (row < last) append_rows(row, last - row);
  if (row <= last && end % stride != 0) append_part_of_row(last, 0, end % stride);
}

void append_run(std::vector<Run>& runs, const Run& run) {
  if (!runs.empty()) {
    Run& last = runs.back();
    if (last.source + last.length == run.source && last.destination + last.length == run.destination) {
      last.length += run.length;
      return;
    }
  }
  runs.push_back(run);
}

/// runs_to_box(), with `base` added to all destinations.
void append_runs(const Box& source, const Box& destination, std::int64_t base, std::vector<Run>& runs) {
  const std::optional<Box> common = intersection(source, destination);
  if (!common) return;
  // Up to here from the last dimension, the common elements lie side by side in both boxes.
  std::size_t inner = common->sizes.size();
  std::int64_t length = 1;
  while (inner > 0) {
    --inner;
    length *= common->sizes[inner];
    if (common->sizes[inner] != source.sizes[inner] || common->sizes[inner] != destination.sizes[inner]) break;
  }
  const auto position = [&](const Box& box, const Shape& index) {
    std::int64_t at = 0;
    for (std::size_t d = 0; d < index.size(); ++d) at = at * box.sizes[d] + (index[d] - box.offsets[d]);
    return at;
  };
  for (Shape index = common->offsets;;) {
    append_run(runs, {position(source, index), base + position(destination, index), length});
    std::size_t d = inner;
    while (d > 0 && ++index[d - 1] == common->offsets[d - 1] + common->sizes[d - 1]) {
      index[d - 1] = common->offsets[d - 1];
      --d;
    }
    if (d == 0) return;
  }
}

}  // namespace

std::int64_t numel(std::span<const std::int64_t> sizes) {
  std::int64_t product = 1;
  bool fits = true;
  bool empty = false;
  for (const std::int64_t size : sizes) {
    if (size < 0) throw Error("a tensor of shape " + in_brackets(sizes) + " has a negative size");
    empty = empty || size == 0;
    fits = fits && !__builtin_mul_overflow(product, size, &product);
  }
  if (empty) return 0;
  if (!fits) throw Error("a tensor of shape " + in_brackets(sizes) + " has more than 2^63 - 1 elements");
  return product;
}

Box whole(Shape shape) {
  Shape zeros(shape.size(), 0);
  return {std::move(zeros), std::move(shape)};
}

void check_within(const Box& box, std::span<const std::int64_t> shape) {
  bool within = box.offsets.size() == shape.size() && box.sizes.size() == shape.size();
  for (std::size_t d = 0; within && d < shape.size(); ++d) {
    within = box.offsets[d] >= 0 && box.sizes[d] >= 0 && box.offsets[d] <= shape[d] && box.sizes[d] <= shape[d] - box.offsets[d];
  }
  if (within) return;
  throw Error("a box of sizes " + in_brackets(box.sizes) + " at " + in_brackets(box.offsets) + " does not lie in a tensor of shape " +
              in_brackets(shape));
}

std::vector<Box> boxes_of_slice(std::span<const std::int64_t> shape, std::int64_t offset, std::int64_t numel) {
  const std::int64_t all = ckpt::numel(shape);
  if (offset < 0 || numel < 0 || offset > all || numel > all - offset) {
    throw Error("elements [" + std::to_string(offset) + ", " + std::to_string(offset) + " + " + std::to_string(numel) +
                ") do not lie in a tensor of shape " + in_brackets(shape));
  }
  if (numel == 0) return {};
  Shape strides(shape.size(), 1);
  for (std::size_t d = shape.size(); d-- > 1;) strides[d - 1] = strides[d] * shape[d];
  std::vector<Box> boxes;
  Shape outer;
  append_boxes(shape, strides, outer, offset, offset + numel, boxes);
  return boxes;
}

std::vector<Box> boxes_of_slice(const Box& box, std::int64_t offset, std::int64_t numel) {
  auto boxes = boxes_of_slice(box.sizes, offset, numel);
  for (auto& part : boxes) {
    for (std::size_t d = 0; d < part.offsets.size(); ++d) part.offsets[d] += box.offsets[d];
  }
  return boxes;
}

std::optional<Box> intersection(const Box& a, const Box& b) {
  if (a.sizes.size() != b.sizes.size()) {
    throw Error("boxes of " + std::to_string(a.sizes.size()) + " and " + std::to_string(b.sizes.size()) +
                " dimensions are not parts of one tensor");
  }
  Box common = a;
  for (std::size_t d = 0; d < a.sizes.size(); ++d) {
    const std::int64_t begin = std::max(a.offsets[d], b.offsets[d]);
    const std::int64_t end = std::min(a.offsets[d] + a.sizes[d], b.offsets[d] + b.sizes[d]);
    if (begin >= end) return std::nullopt;
    common.offsets[d] = begin;
    common.sizes[d] = end - begin;
  }
  return common;
}

void append_difference(const Box& a, const Box& b, std::vector<Box>& boxes) {
  const auto common = intersection(a, b);
  if (!common) return boxes.push_back(a);
  // For each dimension, what lies before and behind the common range in it, within the common ranges of the dimensions before.
  Box rest = a;
  for (std::size_t d = 0; d < a.sizes.size(); ++d) {
    const std::int64_t end = rest.offsets[d] + rest.sizes[d];
    const std::int64_t common_end = common->offsets[d] + common->sizes[d];
    if (rest.offsets[d] < common->offsets[d]) {
      boxes.push_back(rest);
      boxes.back().sizes[d] = common->offsets[d] - rest.offsets[d];
    }
    if (common_end < end) {
      boxes.push_back(rest);
      boxes.back().offsets[d] = common_end;
      boxes.back().sizes[d] = end - common_end;
    }
    rest.offsets[d] = common->offsets[d];
    rest.sizes[d] = common->sizes[d];
  }
}

std::vector<Run> runs_to_box(const Box& source, const Box& destination) {
  std::vector<Run> runs;
  append_runs(source, destination, 0, runs);
  return runs;
}

std::vector<Run> runs_to_slice(const Box& source, std::span<const Box> slice) {
  std::vector<Run> runs;
  std::int64_t base = 0;
  for (const Box& part : slice) {
    append_runs(source, part, base, runs);
    base += ckpt::numel(part.sizes);
  }
  return runs;
}

}  // namespace fsdp::ckpt
