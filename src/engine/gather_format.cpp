#include "fsdp/gather_format.h"

#include <ATen/ATen.h>

#include <string>

#include "fsdp/error.h"

namespace fsdp {
namespace {

// Of float8_e4m3fn; and the exponent byte of e8m0, whose value is 2^(byte - 127), 255 being NaN.
constexpr double kLargest = 448;
constexpr int kBias = 127;
constexpr int kNan = 255;

/// The bytes of a piece: its elements, then the scales of its blocks.
void narrow(const at::Tensor& main, const at::Tensor& wire, std::int64_t block) {
  const auto pieces = main.size(0);
  const auto numel = main.size(1);
  const auto blocks = main.to(at::kFloat).view({pieces, numel / block, block});
  const auto largest = blocks.abs().amax(-1);
  // The smallest power of two by which the largest magnitude fits: x = m * 2^e with m in [0.5, 1), so 2^e, or 2^(e-1) if x is a power itself.
  const auto [mantissa, power] = at::frexp(largest / kLargest);
  const auto fits = (power - (mantissa == 0.5).to(power.scalar_type())).clamp_(-kBias, kBias);
  const auto exponent = at::where(largest > 0, fits, at::full_like(fits, -kBias));
  const auto finite = at::isfinite(largest);
  wire.slice(1, 0, numel).view({pieces, numel / block, block}).view(at::kFloat8_e4m3fn).copy_(at::ldexp(blocks, -exponent.unsqueeze(-1)));
  wire.slice(1, numel).copy_(at::where(finite, exponent + kBias, at::full_like(exponent, kNan)));
}

void widen(const at::Tensor& wire, const at::Tensor& whole, std::int64_t block) {
  const auto pieces = whole.size(0);
  const auto numel = whole.size(1);
  const auto exponent = wire.slice(1, numel).to(at::kInt);
  const auto scale = at::where(exponent == kNan, at::full({}, NAN, at::kFloat), at::ldexp(at::ones({}, at::kFloat), exponent - kBias));
  const auto elements = wire.slice(1, 0, numel).view(at::kFloat8_e4m3fn).to(at::kFloat).view({pieces, numel / block, block});
  whole.view({pieces, numel / block, block}).copy_(elements.mul(scale.unsqueeze(-1)));
}

}  // namespace

GatherFormat float8_blocks(std::int64_t block) {
  if (block <= 0 || block % 16 != 0) throw Error("float8_blocks(" + std::to_string(block) + "): a block is a positive multiple of 16 elements");
  return {.block = block,
          .block_bytes = block + 1,
          .pre_all_gather = [block](const at::Tensor& main, const at::Tensor& wire) { narrow(main, wire, block); },
          .post_all_gather = [block](const at::Tensor& wire, const at::Tensor& whole) { widen(wire, whole, block); }};
}

}  // namespace fsdp
