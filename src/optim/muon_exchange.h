#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "fsdp/muon.h"

namespace fsdp::optim {

/// A matrix, cut over the ranks of a row along one dimension as torch.chunk cuts. Its owner makes its updates orthogonal.
struct CutMatrix {
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t dim = 0;  ///< 0 or 1: along which it is cut.
  std::int64_t owner = 0;
};

/// This rank's parts of a matrix; the gradient is read, the others are written.
struct MuonPart {
  CutMatrix matrix;
  at::Tensor value;
  at::Tensor gradient;
  at::Tensor momentum;
};

/// One step of Muon on matrices that are cut: each goes to its owner, and comes back orthogonal. The caller sends the messages, in two
/// exchanges in which each rank has something for each other. All ranks give the same matrices, each its parts.
class MuonExchange {
 public:
  MuonExchange(std::vector<MuonPart> parts, std::int64_t ranks, std::int64_t rank, const MuonOptions& options)
      : parts_(std::move(parts)), ranks_(ranks), rank_(rank), options_(options) {}

  /// Elements for each rank (first) and from each rank (second) in the first exchange; in the second one the other way round.
  std::pair<std::vector<std::int64_t>, std::vector<std::int64_t>> numels() const;
  /// Takes the gradients into the momenta. What it returns is for the first exchange: 1-D, in order of the ranks.
  at::Tensor directions();
  /// From what the first exchange gave to what the second one takes.
  at::Tensor orthogonalize(const at::Tensor& received) const;
  /// Updates the values by what the second exchange gave.
  void apply(const at::Tensor& received, double lr, double weight_decay, AdjustLR adjust_lr);

 private:
  std::vector<std::int64_t> shape_of_part(const CutMatrix& matrix, std::int64_t rank) const;
  std::int64_t numel_of_part(const CutMatrix& matrix, std::int64_t rank) const;
  at::Tensor joined(const std::vector<at::Tensor>& pieces) const;

  std::vector<MuonPart> parts_;
  std::int64_t ranks_;
  std::int64_t rank_;
  MuonOptions options_;
};

}  // namespace fsdp::optim
