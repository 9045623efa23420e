#include "optim/norm.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <string>

#include "fsdp/error.h"

namespace fsdp::optim {
namespace {

double add(double a, double b) { return a + b; }
/// Returns the larger number; NaN if one is NaN.
double larger(double a, double b) { return b > a || std::isnan(b) ? b : a; }

/// Uses independent partial results, so that the compiler can use vector registers. The order of additions depends on the number of
/// elements only.
template <typename T, typename Term, typename Merge>
double fold(const T* data, std::int64_t numel, const Term& term, const Merge& merge) {
  constexpr std::int64_t kLanes = 8;
  std::array<double, kLanes> partial{};
  std::int64_t i = 0;
  for (; i + kLanes <= numel; i += kLanes) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
      auto& to = partial[static_cast<std::size_t>(lane)];
      to = merge(to, term(static_cast<double>(data[i + lane])));
    }
  }
  for (; i < numel; ++i) partial[0] = merge(partial[0], term(static_cast<double>(data[i])));
  double merged = 0;
  for (const double part : partial) merged = merge(merged, part);
  return merged;
}

}  // namespace

Norm::Norm(double p, const char* function) : p_(p) {
  if (!(p > 0)) throw Error(std::string(function) + ": norm_type must be positive or infinity, got " + std::to_string(p));
}

/// False for the rare dtypes that frozen parameters may have.
static bool is_common(const at::Tensor& piece) { return piece.is_floating_point() && piece.element_size() > 1; }

static at::Tensor magnitudes(const at::Tensor& piece) {
  return (piece.is_complex() ? piece.abs() : piece.to(at::kDouble).abs()).to(at::kDouble);
}

double Norm::of_piece_on_host(const at::Tensor& piece) const {
  if (!is_common(piece)) return of_piece_on_host(magnitudes(piece));
  return AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, piece.scalar_type(), "norm", [&] {
    const auto* data = piece.const_data_ptr<scalar_t>();
    if (p_ == 2)
      return fold(
          data, piece.numel(), [](double x) { return x * x; }, add);
    if (p_ == 1)
      return fold(
          data, piece.numel(), [](double x) { return std::abs(x); }, add);
    if (std::isinf(p_))
      return fold(
          data, piece.numel(), [](double x) { return std::abs(x); }, larger);
    return fold(
        data, piece.numel(), [this](double x) { return std::pow(std::abs(x), p_); }, add);
  });
}

at::Tensor Norm::of_pieces(const std::vector<at::Tensor>& pieces) const {
  double merged = 0;
  bool has_host = false;
  std::vector<at::Tensor> on_device;
  for (const auto& piece : pieces) {
    if (piece.is_cpu()) {
      merged = merge(merged, of_piece_on_host(piece.contiguous()));
      has_host = true;
    } else if (piece.numel() > 0) {
      on_device.push_back(is_common(piece) ? piece : magnitudes(piece));
    }
  }
  if (on_device.empty()) return at::scalar_tensor(merged, at::kDouble);
  auto norms = at::_foreach_norm(on_device, p_, at::kDouble);
  if (!std::isinf(p_)) at::_foreach_pow_(norms, p_);
  if (has_host) norms.push_back(at::scalar_tensor(merged, norms.front().options()));
  return merge(at::stack(norms));
}

double Norm::merge(double a, double b) const { return std::isinf(p_) ? larger(a, b) : add(a, b); }

double Norm::finish(double merged) const {
  if (p_ == 2) return std::sqrt(merged);
  return p_ == 1 || std::isinf(p_) ? merged : std::pow(merged, 1 / p_);
}

at::Tensor Norm::merge(const at::Tensor& parts) const { return std::isinf(p_) ? parts.max() : parts.sum(); }

at::Tensor Norm::finish(const at::Tensor& merged) const {
  if (p_ == 2) return merged.sqrt();
  return p_ == 1 || std::isinf(p_) ? merged : merged.pow(1 / p_);
}

}  // namespace fsdp::optim
