#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace fsdp::optim {

/// A p-norm is taken apart: each piece of the gradients adds up its elements' powers, pieces are merged in the order of the ranks, and the
/// root is taken at the end. For p = inf the sum is a maximum, and there is no root.
class Norm {
 public:
  /// Throws Error, which begins with `function`, if p is not positive.
  Norm(double p, const char* function);
  /// Returns the merged sum of the powers of all pieces: a 0-D fp64 tensor on the device of the pieces (which lie on at most one device
  /// beside the CPU). The host does not wait.
  at::Tensor of_pieces(const std::vector<at::Tensor>& pieces) const;
  double merge(double a, double b) const;
  double finish(double merged) const;
  /// Does so for a 1-D tensor, on its device.
  at::Tensor merge(const at::Tensor& parts) const;
  at::Tensor finish(const at::Tensor& merged) const;

 private:
  double of_piece_on_host(const at::Tensor& piece) const;

  double p_;
};

}  // namespace fsdp::optim
