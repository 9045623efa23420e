#include "fsdp/gather_format.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <string>

#include "base/block_format.h"
#include "base/parallel_for.h"
#include "fsdp/error.h"

namespace fsdp {
namespace {

// The exponent byte of e8m0, whose value is 2^(byte - 127).
constexpr int kBias = 127;

/// So many blocks take longer to convert than a thread to wake up.
constexpr std::int64_t kBlocksPerTask = 512;

/// The bytes of a piece: its elements, then the scales of its blocks.
struct Piece {
  Piece(const at::Tensor& encoded, std::int64_t numel, std::int64_t block)
      : elements(encoded.slice(1, 0, numel).view(at::kFloat8_e4m3fn).unflatten(1, {numel / block, block})),
        scale_bytes(encoded.slice(1, numel)) {}
  at::Tensor scales() const { return scale_bytes.view(at::kFloat8_e8m0fnu).to(at::kFloat).unsqueeze(-1); }

  at::Tensor elements;     ///< [pieces, blocks, block], views of the encoded bytes.
  at::Tensor scale_bytes;  ///< [pieces, blocks]
};

BlockedPieces pieces_of(const at::Tensor& values, const at::Tensor& encoded, std::int64_t block) {
  return {.values = const_cast<void*>(values.const_data_ptr()),
          .dtype = values.scalar_type(),
          .encoded = static_cast<std::uint8_t*>(const_cast<void*>(encoded.const_data_ptr())),
          .pieces = values.size(0),
          .numel = values.size(1),
          .block = block};
}

/// By a kernel of ours, if the device has one.
bool launch(const DeviceFunctions<LaunchConversion>& functions, const at::Tensor& values, const at::Tensor& encoded, std::int64_t block) {
  const auto device = values.device();
  auto* const function = functions.of(device.type());
  if (function == nullptr || !with_real_type(values.scalar_type(), [](auto) {})) return false;
  const c10::DeviceGuard guard(device);
  if (values.numel() > 0) function(pieces_of(values, encoded, block), c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  return true;
}

void narrow_by_operators(const at::Tensor& main, const at::Tensor& encoded, std::int64_t block) {
  const Piece piece(encoded, main.size(1), block);
  const auto blocks = main.to(at::kFloat).unflatten(1, {main.size(1) / block, block});
  const auto largest = blocks.abs().amax(-1);
  // The smallest power of two by which the largest magnitude fits: x = m * 2^e with m in [0.5, 1), so 2^e, or 2^(e-1) if x is a power
  // itself.
  const auto [mantissa, power] = at::frexp(largest / kLargestFloat8);
  const auto exponent = (power - mantissa.eq(0.5).to(power.scalar_type())).clamp_(-kBias, kBias).masked_fill_(mantissa.eq(0), -kBias);
  piece.scale_bytes.copy_(exponent.add_(kBias).masked_fill_(largest.isfinite().logical_not_(), kNanScale));
  piece.elements.copy_(blocks / piece.scales());
}

void widen_by_operators(const at::Tensor& encoded, const at::Tensor& whole, std::int64_t block) {
  const Piece piece(encoded, whole.size(1), block);
  whole.unflatten(1, {whole.size(1) / block, block}).copy_(piece.elements.to(at::kFloat) * piece.scales());
}

void narrow(const at::Tensor& main, const at::Tensor& encoded, std::int64_t block) {
  if (!main.is_cpu()) {
    if (!launch(device_encoders(), main, encoded, block)) narrow_by_operators(main, encoded, block);
    return;
  }
  const auto pieces = pieces_of(main, encoded, block);
  const bool is_real = with_real_type(main.scalar_type(), [&](auto type) {
    parallel_for(pieces.blocks(), kBlocksPerTask, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t number = begin; number < end; ++number) encode_block<decltype(type)>(pieces, number);
    });
  });
  if (!is_real) narrow_by_operators(main, encoded, block);
}

void widen(const at::Tensor& encoded, const at::Tensor& whole, std::int64_t block) {
  if (!whole.is_cpu()) {
    if (!launch(device_decoders(), whole, encoded, block)) widen_by_operators(encoded, whole, block);
    return;
  }
  const auto pieces = pieces_of(whole, encoded, block);
  const bool is_real = with_real_type(whole.scalar_type(), [&](auto type) {
    parallel_for(pieces.blocks(), kBlocksPerTask, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t number = begin; number < end; ++number) decode_block<decltype(type)>(pieces, number);
    });
  });
  if (!is_real) widen_by_operators(encoded, whole, block);
}

}  // namespace

DeviceFunctions<LaunchConversion>& device_encoders() {
  static DeviceFunctions<LaunchConversion> functions;
  return functions;
}
DeviceFunctions<LaunchConversion>& device_decoders() {
  static DeviceFunctions<LaunchConversion> functions;
  return functions;
}

GatherFormat float8_blocks(std::int64_t block) {
  if (block <= 0 || block % 16 != 0)
    throw Error("float8_blocks(" + std::to_string(block) + "): a block is a positive multiple of 16 elements");
  return {.block = block,
          .block_bytes = block + 1,
          .pre_all_gather = [block](const at::Tensor& main, const at::Tensor& encoded) { narrow(main, encoded, block); },
          .post_all_gather = [block](const at::Tensor& encoded, const at::Tensor& whole) { widen(encoded, whole, block); }};
}

}  // namespace fsdp
