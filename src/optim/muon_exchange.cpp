#include "optim/muon_exchange.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "optim/muon_step.h"

namespace fsdp::optim {

std::vector<std::int64_t> MuonExchange::shape_of_piece(const CutMatrix& matrix, std::int64_t rank) const {
  std::vector<std::int64_t> shape = {matrix.rows, matrix.columns};
  auto& size = shape[static_cast<std::size_t>(matrix.dim)];
  const auto per_rank = (size + ranks_ - 1) / ranks_;
  size = std::clamp<std::int64_t>(size - rank * per_rank, 0, per_rank);
  return shape;
}

std::int64_t MuonExchange::numel_of_piece(const CutMatrix& matrix, std::int64_t rank) const {
  const auto shape = shape_of_piece(matrix, rank);
  return shape[0] * shape[1];
}

at::Tensor MuonExchange::joined(const std::vector<at::Tensor>& pieces) const {
  const auto like = pieces_.front().value.options().dtype(options_.ns_dtype.value());
  return pieces.empty() ? at::empty({0}, like) : at::cat(pieces);
}

std::pair<std::vector<std::int64_t>, std::vector<std::int64_t>> MuonExchange::numels() const {
  const auto ranks = static_cast<std::size_t>(ranks_);
  std::vector<std::int64_t> to(ranks, 0);
  std::vector<std::int64_t> from(ranks, 0);
  for (const auto& piece : pieces_) {
    to[static_cast<std::size_t>(piece.matrix.owner)] += numel_of_piece(piece.matrix, rank_);
    if (piece.matrix.owner != rank_) continue;
    for (std::int64_t rank = 0; rank < ranks_; ++rank) from[static_cast<std::size_t>(rank)] += numel_of_piece(piece.matrix, rank);
  }
  return {to, from};
}

at::Tensor MuonExchange::directions() {
  std::vector<std::vector<at::Tensor>> pieces(static_cast<std::size_t>(ranks_));
  for (auto& piece : pieces_) {
    // It is rounded here and not by the owner, so that it is sent in the dtype of the iterations.
    const auto direction = muon_direction(piece.momentum, piece.gradient, options_).to(options_.ns_dtype.value());
    pieces[static_cast<std::size_t>(piece.matrix.owner)].push_back(direction.reshape({-1}));
  }
  std::vector<at::Tensor> all;
  for (auto& of_owner : pieces) all.insert(all.end(), of_owner.begin(), of_owner.end());
  return joined(all);
}

at::Tensor MuonExchange::orthogonalize(const at::Tensor& received) const {
  std::vector<CutMatrix> mine;
  for (const auto& piece : pieces_) {
    if (piece.matrix.owner == rank_) mine.push_back(piece.matrix);
  }
  std::vector<std::vector<at::Tensor>> pieces_of(mine.size());
  std::int64_t at = 0;
  for (std::int64_t rank = 0; rank < ranks_; ++rank) {
    for (std::size_t i = 0; i < mine.size(); ++i) {
      const auto numel = numel_of_piece(mine[i], rank);
      pieces_of[i].push_back(received.narrow(0, at, numel).view(shape_of_piece(mine[i], rank)));
      at += numel;
    }
  }
  std::vector<std::vector<at::Tensor>> pieces(static_cast<std::size_t>(ranks_));
  for (std::size_t i = 0; i < mine.size(); ++i) {
    const auto whole = orthogonalized(at::cat(pieces_of[i], mine[i].dim), options_);
    std::int64_t begin = 0;
    for (std::int64_t rank = 0; rank < ranks_; ++rank) {
      const auto size = shape_of_piece(mine[i], rank)[static_cast<std::size_t>(mine[i].dim)];
      pieces[static_cast<std::size_t>(rank)].push_back(whole.narrow(mine[i].dim, begin, size).reshape({-1}));
      begin += size;
    }
  }
  std::vector<at::Tensor> all;
  for (auto& of_rank : pieces) all.insert(all.end(), of_rank.begin(), of_rank.end());
  return joined(all);
}

void MuonExchange::apply(const at::Tensor& received, double lr, double weight_decay, AdjustLR adjust_lr) {
  std::int64_t at = 0;
  for (std::int64_t owner = 0; owner < ranks_; ++owner) {
    for (auto& piece : pieces_) {
      if (piece.matrix.owner != owner) continue;
      const auto numel = numel_of_piece(piece.matrix, rank_);
      muon_update(piece.value, received.narrow(0, at, numel).view(shape_of_piece(piece.matrix, rank_)), lr, weight_decay, adjust_lr,
                  piece.matrix.rows, piece.matrix.columns);
      at += numel;
    }
  }
}

}  // namespace fsdp::optim
