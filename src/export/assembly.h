#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "comm/communicator.h"

namespace fsdp::weights {

/// A box that a tensor and a piece of it have in common.
struct PlacedBox {
  std::vector<std::int64_t> in_piece;  ///< Where it begins in the piece.
  std::vector<std::int64_t> in_whole;  ///< Where it begins in the tensor.
  std::vector<std::int64_t> sizes;
};

/// How a tensor is assembled from the pieces of ranks along further dimensions of the mesh (tensor parallelism, experts). The unit then
/// shards this rank's piece.
struct Assembly {
  std::vector<std::shared_ptr<comm::Communicator>> rows;  ///< This rank's along these dimensions, the outermost first.
  std::vector<std::vector<std::int64_t>> shapes;          ///< Of the pieces, by rank: it varies fastest along the last dimension.
  std::vector<std::vector<PlacedBox>> boxes;              ///< By rank: those of its piece, which have no element in common.

  /// This rank's index in `shapes`.
  std::size_t rank() const;
  /// The pieces' numbers of elements.
  std::vector<std::int64_t> numel() const;
};

/// How a unit cuts a piece: its elements arrive from one rank after the other, those of each in row-major order.
struct Cut {
  std::int64_t dim = 0;
  std::int64_t ranks = 1;  ///< Along another dimension than the first one, ranks have equal parts.
};

/// Copies the elements of `arrived` (1-D), which are those of the pieces one after the other, to their places in `whole`. Without an
/// assembly, there is one piece, which is the tensor.
void assemble(const Assembly* assembly, Cut cut, const at::Tensor& arrived, const at::Tensor& whole);
/// True if assemble has nothing to do.
bool arrives_in_order(const Assembly* assembly, Cut cut, const std::vector<std::int64_t>& whole);
/// The places in the flattened tensor `whole` of elements of this rank's piece, of which `places` are those in the flattened piece (int64).
at::Tensor places_in_whole(const Assembly& assembly, const at::Tensor& places, const std::vector<std::int64_t>& whole);

}  // namespace fsdp::weights
