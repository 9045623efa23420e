#include "export/assembly.h"

#include <ATen/ATen.h>
#include <c10/util/accumulate.h>

#include <algorithm>

namespace fsdp::weights {
namespace {

/// The box of a tensor that is its own only piece.
PlacedBox all_of(const std::vector<std::int64_t>& shape) {
  return {.in_piece = std::vector<std::int64_t>(shape.size(), 0), .in_whole = std::vector<std::int64_t>(shape.size(), 0), .sizes = shape};
}

at::Tensor box_of(at::Tensor tensor, const std::vector<std::int64_t>& offsets, const std::vector<std::int64_t>& sizes) {
  for (std::size_t d = 0; d < sizes.size(); ++d) tensor = tensor.narrow(static_cast<std::int64_t>(d), offsets[d], sizes[d]);
  return tensor;
}

/// What a box has within [from, from + size) of the piece's dimension d, as a box of this range. It may be empty.
PlacedBox within(PlacedBox box, std::size_t d, std::int64_t from, std::int64_t size) {
  const auto begin = std::max(box.in_piece[d], from);
  const auto end = std::min(box.in_piece[d] + box.sizes[d], from + size);
  box.in_whole[d] += begin - box.in_piece[d];
  box.in_piece[d] = begin - from;
  box.sizes[d] = std::max(end - begin, std::int64_t{0});
  return box;
}

/// Copies a piece's boxes into the tensor. Returns the number of the piece's elements.
std::int64_t place(const std::vector<PlacedBox>& boxes, const std::vector<std::int64_t>& shape, Cut cut, const at::Tensor& arrived,
                   const at::Tensor& whole) {
  const auto numel = c10::multiply_integers(shape);
  if (numel == 0) return 0;
  const auto dim = static_cast<std::size_t>(cut.dim);
  auto of_rank = shape;
  if (cut.ranks > 1) of_rank[dim] /= cut.ranks;
  for (std::int64_t rank = 0; rank < cut.ranks; ++rank) {
    const auto values = arrived.narrow(0, rank * (numel / cut.ranks), numel / cut.ranks).view(of_rank);
    for (const auto& box : boxes) {
      const auto common = cut.ranks > 1 ? within(box, dim, rank * of_rank[dim], of_rank[dim]) : box;
      if (c10::multiply_integers(common.sizes) == 0) continue;
      box_of(whole, common.in_whole, common.sizes).copy_(box_of(values, common.in_piece, common.sizes));
    }
  }
  return numel;
}

}  // namespace

std::size_t Assembly::rank() const {
  std::int64_t index = 0;
  for (const auto& row : rows) index = index * row->size() + row->rank();
  return static_cast<std::size_t>(index);
}

std::vector<std::int64_t> Assembly::numel() const {
  std::vector<std::int64_t> numel;
  for (const auto& shape : shapes) numel.push_back(c10::multiply_integers(shape));
  return numel;
}

bool arrives_in_order(const Assembly* assembly, Cut cut, const std::vector<std::int64_t>& whole) {
  if (c10::multiply_integers(whole) == 0) return true;
  if (cut.ranks > 1 && cut.dim != 0) return false;
  if (assembly == nullptr) return true;
  // The boxes are the whole tensor: if each begins with the row behind the one before, they have all columns.
  std::int64_t next = 0;
  for (const auto& boxes : assembly->boxes) {
    for (const auto& box : boxes) {
      if (c10::multiply_integers(box.sizes) == 0) continue;
      if (box.in_whole.front() != next) return false;
      next += box.sizes.front();
    }
  }
  return true;
}

void assemble(const Assembly* assembly, Cut cut, const at::Tensor& arrived, const at::Tensor& whole) {
  if (cut.dim == 0) cut.ranks = 1;  // Parts along the first dimension lie as they do in the piece.
  if (assembly == nullptr) {
    place({all_of(whole.sizes().vec())}, whole.sizes().vec(), cut, arrived, whole);
    return;
  }
  std::int64_t begin = 0;
  for (std::size_t rank = 0; rank < assembly->shapes.size(); ++rank) {
    begin += place(assembly->boxes[rank], assembly->shapes[rank], cut, arrived.narrow(0, begin, arrived.numel() - begin), whole);
  }
}

at::Tensor places_in_whole(const Assembly& assembly, const at::Tensor& places, const std::vector<std::int64_t>& whole) {
  const auto& shape = assembly.shapes[assembly.rank()];
  auto found = at::zeros_like(places);
  for (const auto& box : assembly.boxes[assembly.rank()]) {
    auto is_within = at::ones_like(places, at::kBool);
    auto in_whole = at::zeros_like(places);
    auto rest = places;  // in the row of the dimensions that are left
    for (std::size_t d = 0; d < shape.size(); ++d) {
      const auto below = shape.begin() + static_cast<std::ptrdiff_t>(d) + 1;
      const auto row = std::max(c10::multiply_integers(below, shape.end()), std::int64_t{1});
      const auto index = rest.div(row, "floor") - box.in_piece[d];
      rest = rest.remainder(row);
      is_within.logical_and_(index.ge(0).logical_and_(index.lt(box.sizes[d])));
      in_whole = in_whole * whole[d] + index + box.in_whole[d];
    }
    found = at::where(is_within, in_whole, found);
  }
  return found;
}

}  // namespace fsdp::weights
