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
struct Piece {
  Piece(const at::Tensor& wire, std::int64_t numel, std::int64_t block)
      : elements(wire.slice(1, 0, numel).view(at::kFloat8_e4m3fn).unflatten(1, {numel / block, block})),
        scale_bytes(wire.slice(1, numel)) {}
  at::Tensor scales() const { return scale_bytes.view(at::kFloat8_e8m0fnu).to(at::kFloat).unsqueeze(-1); }

  at::Tensor elements;     ///< [pieces, blocks, block], views of the wire's bytes.
  at::Tensor scale_bytes;  ///< [pieces, blocks]
};

void narrow(const at::Tensor& main, const at::Tensor& wire, std::int64_t block) {
  const Piece piece(wire, main.size(1), block);
  const auto blocks = main.to(at::kFloat).unflatten(1, {main.size(1) / block, block});
  const auto largest = blocks.abs().amax(-1);
  // The smallest power of two by which the largest magnitude fits: x = m * 2^e with m in [0.5, 1), so 2^e, or 2^(e-1) if x is a power
  // itself.
  const auto [mantissa, power] = at::frexp(largest / kLargest);
  const auto exponent = (power - mantissa.eq(0.5).to(power.scalar_type())).clamp_(-kBias, kBias).masked_fill_(largest.eq(0), -kBias);
  piece.scale_bytes.copy_(exponent.add_(kBias).masked_fill_(largest.isfinite().logical_not_(), kNan));
  piece.elements.copy_(blocks / piece.scales());
}

void widen(const at::Tensor& wire, const at::Tensor& whole, std::int64_t block) {
  const Piece piece(wire, whole.size(1), block);
  whole.unflatten(1, {whole.size(1) / block, block}).copy_(piece.elements.to(at::kFloat) * piece.scales());
}

}  // namespace

GatherFormat float8_blocks(std::int64_t block) {
  if (block <= 0 || block % 16 != 0)
    throw Error("float8_blocks(" + std::to_string(block) + "): a block is a positive multiple of 16 elements");
  return {.block = block,
          .block_bytes = block + 1,
          .pre_all_gather = [block](const at::Tensor& main, const at::Tensor& wire) { narrow(main, wire, block); },
          .post_all_gather = [block](const at::Tensor& wire, const at::Tensor& whole) { widen(wire, whole, block); }};
}

}  // namespace fsdp
