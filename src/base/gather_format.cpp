#include "fsdp/gather_format.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <bit>
#include <string>

#include "base/block_format.h"
#include "base/int4_blocks.h"
#include "base/parallel_for.h"
#include "base/rounded_rows.h"
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
  // itself. By a tensor: on CUDA, torch multiplies by the inverse of a number.
  const auto [mantissa, power] = at::frexp(largest / at::full_like(largest, kLargestFloat8));
  const auto exponent = (power - mantissa.eq(0.5).to(power.scalar_type())).clamp_(-kBias, kBias).masked_fill_(mantissa.eq(0), -kBias);
  piece.scale_bytes.copy_(exponent.add_(kBias).masked_fill_(largest.isfinite().logical_not_(), kNanScale));
  piece.elements.copy_(blocks / piece.scales());
}

void widen_by_operators(const at::Tensor& encoded, const at::Tensor& whole, std::int64_t block) {
  const Piece piece(encoded, whole.size(1), block);
  whole.unflatten(1, {whole.size(1) / block, block}).copy_(piece.elements.to(at::kFloat) * piece.scales());
}

// In a plan, tensors have no values, and some operators no kernel without Python.
void narrow(const at::Tensor& main, const at::Tensor& encoded, std::int64_t block) {
  if (main.is_meta()) return;
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
  if (whole.is_meta()) return;
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

/// So many elements take longer to convert than a thread to wake up.
constexpr std::int64_t kElementsPerTask = 16384;

Int4Pieces pieces_of(const at::Tensor& values, const at::Tensor& encoded, const Int4Differences& options) {
  return {.values = const_cast<void*>(values.const_data_ptr()),
          .encoded = static_cast<std::uint8_t*>(const_cast<void*>(encoded.const_data_ptr())),
          .pieces = values.size(0),
          .numel = values.size(1),
          .block = options.block,
          .hadamard = options.hadamard};
}

/// Calls fn with the number of each block.
template <typename Fn>
void for_each_block(const Int4Pieces& pieces, const Fn& fn) {
  parallel_for(pieces.blocks(), std::max<std::int64_t>(kElementsPerTask / pieces.block, 1), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t number = begin; number < end; ++number) fn(number);
  });
}

void encode_int4_by_operators(const at::Tensor& difference, const at::Tensor& encoded, const Int4Differences& options) {
  const auto numel = difference.size(1);
  const auto half = options.block / 2;
  auto blocks = difference.unflatten(1, {numel / options.block, options.block});
  if (options.hadamard) blocks = hadamard_by_operators(blocks);
  const auto largest = blocks.abs().amax(-1);
  const auto rounded_up = (largest * (1 / kLargestInt4)).view(at::kInt).add(0xffff).bitwise_right_shift(16);
  const auto bits = rounded_up.masked_fill(largest.isfinite().logical_not(), kInt4NanScale);
  const auto scales = bits.bitwise_left_shift(16).view(at::kFloat);
  const auto scaled = (blocks / scales.unsqueeze(-1)).masked_fill(scales.gt(0).logical_not().unsqueeze(-1), 0);
  const auto codes = scaled.round().to(at::kInt).bitwise_and(0xf);
  const auto bytes = codes.narrow(-1, 0, half).bitwise_or(codes.narrow(-1, half, half).bitwise_left_shift(4));
  encoded.slice(1, 0, numel / 2).copy_(bytes.flatten(1));
  encoded.slice(1, numel / 2).view(at::kShort).copy_(bits);
}

void add_int4_by_operators(const at::Tensor& encoded, const at::Tensor& whole, const Int4Differences& options) {
  const auto numel = whole.size(1);
  const auto bytes = encoded.slice(1, 0, numel / 2).unflatten(1, {numel / options.block, options.block / 2}).to(at::kInt);
  const auto codes = at::cat({bytes, bytes.bitwise_right_shift(4)}, -1);
  auto values = codes.bitwise_left_shift(28).bitwise_right_shift(28).to(at::kFloat);
  auto scales = encoded.slice(1, numel / 2).view(at::kBFloat16).to(at::kFloat).unsqueeze(-1);
  if (options.hadamard) {
    values = hadamard_by_operators(values);
    scales = scales / options.block;
  }
  whole.copy_(whole.to(at::promote_types(whole.scalar_type(), at::kFloat)) + (values * scales).flatten(1));
}

void encode_int4(const at::Tensor& difference, const at::Tensor& encoded, const Int4Differences& options) {
  if (difference.is_meta()) return;
  if (!difference.is_cpu()) return encode_int4_by_operators(difference, encoded, options);
  const auto pieces = pieces_of(difference, encoded, options);
  for_each_block(pieces, [&](std::int64_t number) { encode_int4_block(pieces, number); });
}

void add_int4(const at::Tensor& encoded, const at::Tensor& whole, const Int4Differences& options) {
  if (whole.is_meta()) return;
  const auto pieces = pieces_of(whole, encoded, options);
  const bool is_real = whole.is_cpu() && with_real_type(whole.scalar_type(), [&](auto type) {
                         for_each_block(pieces, [&](std::int64_t number) { add_int4_block<decltype(type)>(pieces, number); });
                       });
  if (!is_real) add_int4_by_operators(encoded, whole, options);
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

GatherFormat int4_differences(const Int4Differences& options) {
  const auto block = options.block;
  const bool transforms = block <= kLongestTransform && std::has_single_bit(static_cast<std::uint64_t>(block));
  if (block <= 0 || block % 16 != 0 || (options.hadamard && !transforms)) {
    throw Error("int4_differences: block " + std::to_string(block) +
                "; a block is a positive multiple of 16 elements, and with hadamard a power of two up to " +
                std::to_string(kLongestTransform));
  }
  return {
      .block = block,
      .block_bytes = block / 2 + 2,
      .pre_all_gather = [options](const at::Tensor& difference, const at::Tensor& encoded) { encode_int4(difference, encoded, options); },
      .post_all_gather = [options](const at::Tensor& encoded, const at::Tensor& whole) { add_int4(encoded, whole, options); },
      .differences = true,
      .settings = options.hadamard ? "int4 differences, transformed" : "int4 differences"};
}

}  // namespace fsdp
