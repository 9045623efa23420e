#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "fsdp/muon.h"

namespace fsdp::optim {

/// A matrix that is cut over the ranks of a row along one dimension, as torch.chunk cuts. One rank, its owner, makes its updates
/// orthogonal.
struct CutMatrix {
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t dim = 0;  ///< The dimension along which it is cut, 0 or 1.
  std::int64_t owner = 0;
};

/// This rank's pieces of a matrix, its gradient and its momentum. The gradient is read, and the others are written.
struct MuonPiece {
  CutMatrix matrix;
  at::Tensor value;
  at::Tensor gradient;
  at::Tensor momentum;
};

/// One step of Muon on matrices that are cut. The update of each matrix is sent to the owner, which makes it orthogonal and sends it back.
/// The caller runs these two exchanges (all-to-all). All ranks give the same matrices, and each gives its own pieces.
class MuonExchange {
 public:
  MuonExchange(std::vector<MuonPiece> pieces, std::int64_t ranks, std::int64_t rank, const MuonOptions& options)
      : pieces_(std::move(pieces)), ranks_(ranks), rank_(rank), options_(options) {}

  /// Returns the numbers of elements that this rank sends to each rank (first) and receives from each rank (second) in the first exchange.
  /// The second exchange has them in reverse.
  std::pair<std::vector<std::int64_t>, std::vector<std::int64_t>> numels() const;
  /// Updates the momenta from the gradients. Returns the 1-D tensor that the first exchange sends, in the order of the ranks.
  at::Tensor directions();
  /// Makes the matrices that the first exchange has delivered orthogonal. Returns the tensor that the second exchange sends.
  at::Tensor orthogonalize(const at::Tensor& received) const;
  /// Updates the values by the tensor that the second exchange has delivered.
  void apply(const at::Tensor& received, double lr, double weight_decay, AdjustLR adjust_lr);

 private:
  std::vector<std::int64_t> shape_of_piece(const CutMatrix& matrix, std::int64_t rank) const;
  std::int64_t numel_of_piece(const CutMatrix& matrix, std::int64_t rank) const;
  at::Tensor joined(const std::vector<at::Tensor>& pieces) const;

  std::vector<MuonPiece> pieces_;
  std::int64_t ranks_;
  std::int64_t rank_;
  MuonOptions options_;
};

}  // namespace fsdp::optim
