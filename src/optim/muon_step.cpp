#include "optim/muon_step.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

namespace fsdp::optim {

at::Tensor muon_direction(at::Tensor& momentum, const at::Tensor& gradient, const MuonOptions& options) {
  momentum.lerp_(gradient.to(momentum.scalar_type()), 1 - options.momentum);
  return options.nesterov ? gradient.to(momentum.scalar_type()).lerp(momentum, options.momentum) : momentum;
}

/// Each iteration maps every singular value s to a s + b s^3 + c s^5, which moves singular values between 0 and 1 towards 1, small ones
/// quickly.
at::Tensor orthogonalized(const at::Tensor& matrix, const MuonOptions& options) {
  const auto [a, b, c] = options.ns_coefficients;
  at::Tensor x = matrix.to(options.ns_dtype.value_or(matrix.is_cpu() ? at::kFloat : at::kBFloat16));
  // Transposed if necessary, so that the shorter side comes first: its Gram matrix is the smaller one.
  const bool tall = x.size(0) > x.size(1);
  if (tall) x = x.t();
  x = x / x.norm().clamp_min(options.eps);  // no singular value is larger than this norm
  for (int step = 0; step < options.ns_steps; ++step) {
    const auto gram = x.matmul(x.t());
    const auto polynomial = at::addmm(gram, gram, gram, /*beta=*/b, /*alpha=*/c);
    x = at::addmm(x, polynomial, x, /*beta=*/a);
  }
  return tall ? x.t() : x;
}

void muon_update(at::Tensor& value, const at::Tensor& orthogonal, double lr, double weight_decay, AdjustLR adjust_lr, std::int64_t rows,
                 std::int64_t columns) {
  const auto m = static_cast<double>(rows);
  const auto n = static_cast<double>(columns);
  const double scale = adjust_lr == AdjustLR::kOriginal ? std::sqrt(std::max(1.0, m / n)) : 0.2 * std::sqrt(std::max(m, n));
  value.mul_(1 - lr * weight_decay);
  value.add_(orthogonal, -lr * scale);
}

}  // namespace fsdp::optim
