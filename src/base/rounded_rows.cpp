#include "base/rounded_rows.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/parallel_for.h"
#include "base/rounded_arithmetic.h"

namespace fsdp {
namespace {

RoundedPart rounded_part(const RoundedRows& rows) {
  return {.values = rows.values.mutable_data_ptr<float>(),
          .value_stride = rows.values.stride(0),
          .encoded = rows.encoded.mutable_data_ptr<std::uint8_t>(),
          .encoded_stride = rows.encoded.stride(0),
          .lost = rows.lost.defined() ? rows.lost.mutable_data_ptr<float>() : nullptr,
          .lost_stride = rows.lost.defined() ? rows.lost.stride(0) : 0,
          .rows = rows.encoded.size(0),
          .own = rows.own,
          .numel = rows.numel,
          .first = rows.first,
          .key = rows.key,
          .reduction_number = rows.reduction_number.defined() ? rows.reduction_number.const_data_ptr<std::int64_t>() : nullptr};
}

template <bool kEncodes>
void convert_on_host(const GradCommFormat& format, const RoundedPart& part) {
  constexpr std::int64_t kWorthAThread = 32768;  // elements
  parallel_for(blocks_of(format, part), std::max<std::int64_t>(kWorthAThread / format.block, 1), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t block = begin; block < end; ++block) convert_block<kEncodes>(OneThread{}, format, part, block);
  });
}

void launch_rounding(LaunchRounding* function, const GradCommFormat& format, std::span<const RoundedRows> all) {
  const auto device = all.front().values.device();
  const c10::DeviceGuard guard(device);
  const auto stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  for (; !all.empty(); all = all.subspan(std::min<std::size_t>(all.size(), DeviceRounding::kMostParts))) {
    DeviceRounding rounding{.format = format};
    for (const RoundedRows& rows : all.first(std::min<std::size_t>(all.size(), DeviceRounding::kMostParts))) {
      rounding.parts[rounding.count++] = rounded_part(rows);
    }
    function(rounding, stream);
  }
}

/// Complete blocks, or the last one, in some rows that follow each other.
struct RowBlocks {
  at::Tensor values;       ///< [rows, blocks, integers]
  at::Tensor encoded;      ///< [rows, blocks, bytes]
  at::Tensor lost;         ///< [rows, blocks, elements], or undefined
  std::int64_t elements;   ///< Of a block.
  std::int64_t first_row;  ///< The number of the first row,
  std::int64_t first;      ///< and of the first block.
};

/// Calls fn(RowBlocks) for the rows before that of `own`, and for those behind it: for their complete blocks, and for the last one if it is
/// shorter.
template <typename Fn>
void for_blocks(const GradCommFormat& format, const RoundedRows& rows, const Fn& fn) {
  const std::int64_t complete = rows.numel / format.block, in_complete = complete * format.block;
  const auto in_rows = [&](std::int64_t begin, std::int64_t end) {
    if (begin == end) return;
    const auto blocks = [&](std::int64_t count, std::int64_t elements, std::int64_t offset, std::int64_t byte_offset) {
      if (count == 0 || elements == 0) return;
      const std::int64_t integers = integers_of(format, elements), bytes = block_bytes(format, elements);
      const std::int64_t row = begin < rows.own ? begin : begin - 1;  // without that of `own`
      const auto part = [&](const at::Tensor& all, std::int64_t from, std::int64_t at, std::int64_t size) {
        return all.narrow(0, from, end - begin).narrow(1, at, count * size).unflatten(1, {count, size});
      };
      fn(RowBlocks{.values = part(rows.values, begin, offset, integers),
                   .encoded = part(rows.encoded, row, byte_offset, bytes),
                   .lost = rows.lost.defined() ? part(rows.lost, row, offset, elements) : at::Tensor(),
                   .elements = elements,
                   .first_row = begin,
                   .first = rows.first + offset / format.block});
    };
    blocks(complete, format.block, 0, 0);
    blocks(1, rows.numel - in_complete, in_complete, encoded_bytes(format, in_complete));
  };
  in_rows(0, rows.own);
  in_rows(rows.own + 1, rows.values.size(0));
}

at::Tensor walsh_hadamard_by_operators(const at::Tensor& blocks) {
  return hadamard_by_operators(blocks * (1.0f / std::sqrt(static_cast<float>(blocks.size(-1)))));
}

// Integers of 64 bits, whose products are cut off. Shifts are those of numbers without a sign.
at::Tensor shifted(const at::Tensor& value, int bits) {
  return value.bitwise_right_shift(bits).bitwise_and((std::int64_t{1} << (64 - bits)) - 1);
}
at::Tensor times(const at::Tensor& value, std::uint64_t factor) { return value * static_cast<std::int64_t>(factor); }
at::Tensor low_word(const at::Tensor& value) { return value.bitwise_and(0xffffffffLL); }

/// mix()
at::Tensor mixed(const at::Tensor& hash, const at::Tensor& value) {
  const auto product = times(hash.bitwise_xor(value), 0x9e3779b97f4a7c15ULL);
  return product.bitwise_xor(shifted(product, 29));
}

/// draw() for each element: [rows, blocks, integers].
at::Tensor draws(const RowBlocks& blocks, const RoundedRows& rows) {
  const auto options = blocks.values.options().dtype(at::kLong);
  const auto count = [&](std::int64_t first, std::int64_t number) { return at::arange(first, first + number, options); };
  const auto scalar = [&](auto value) { return at::full({}, static_cast<std::int64_t>(value), options); };
  auto hash = scalar(rows.key);
  if (rows.reduction_number.defined()) hash = mixed(hash, rows.reduction_number);
  hash = mixed(mixed(hash, scalar(rows.own)), count(blocks.first_row, blocks.values.size(0))).view({-1, 1, 1});
  // scrambled(hash + block)
  hash = hash + count(blocks.first, blocks.values.size(1)).view({1, -1, 1}) + static_cast<std::int64_t>(0x9e3779b97f4a7c15ULL);
  hash = times(hash.bitwise_xor(shifted(hash, 30)), 0xbf58476d1ce4e5b9ULL);
  hash = times(hash.bitwise_xor(shifted(hash, 27)), 0x94d049bb133111ebULL);
  hash = shifted(hash.bitwise_xor(shifted(hash, 31)), 32);
  hash = low_word(hash + times(count(0, blocks.values.size(2)), 0x9e3779b9u));
  hash = low_word(times(hash.bitwise_xor(shifted(hash, 16)), 0x7feb352du));
  hash = low_word(times(hash.bitwise_xor(shifted(hash, 15)), 0x846ca68bu));
  hash = hash.bitwise_xor(shifted(hash, 16));
  return shifted(hash, 8).to(at::kFloat).mul_(0x1p-24).sub_(0.5);
}

void encode_by_operators(const GradCommFormat& format, const RoundedRows& rows) {
  const float most = largest_integer(format);
  for_blocks(format, rows, [&](const RowBlocks& blocks) {
    const std::int64_t integers = blocks.values.size(2);
    const auto elements = blocks.values.narrow(2, 0, blocks.elements);
    blocks.values.narrow(2, blocks.elements, integers - blocks.elements).zero_();
    if (blocks.lost.defined()) blocks.lost.copy_(elements.add_(blocks.lost));
    const auto values = format.hadamard ? walsh_hadamard_by_operators(blocks.values) : blocks.values;
    const auto largest = values.abs().amax(-1, /*keepdim=*/true);
    // By a tensor: on CUDA, torch multiplies by the inverse of a number.
    const auto scale =
        (largest / at::full_like(largest, most)).masked_fill_(largest.isfinite().logical_not(), std::numeric_limits<float>::quiet_NaN());
    auto codes = values / scale;
    if (format.stochastic_rounding) codes.add_(draws(blocks, rows));
    codes.round_().clamp_(-most, most).masked_fill_(scale.gt(0).logical_not(), 0);
    blocks.encoded.narrow(2, 0, sizeof(float)).view(at::kFloat).copy_(scale);
    const auto bytes = blocks.encoded.narrow(2, sizeof(float), integers * format.bits / 8);
    if (format.bits == 8) {
      bytes.view(at::kChar).copy_(codes);
    } else {
      const auto bits = codes.to(at::kInt).bitwise_and(15);
      const std::int64_t half = integers / 2;
      bytes.copy_(bits.narrow(2, 0, half).bitwise_or(bits.narrow(2, half, half).bitwise_left_shift(4)));
    }
    if (!blocks.lost.defined()) return;
    auto arrived = codes * scale;
    if (format.hadamard) arrived = walsh_hadamard_by_operators(arrived);
    const auto rest = blocks.lost - arrived.narrow(2, 0, blocks.elements);
    blocks.lost.copy_(rest.masked_fill(rest.isfinite().logical_not(), 0));
  });
}

void decode_by_operators(const GradCommFormat& format, const RoundedRows& rows) {
  for_blocks(format, rows, [&](const RowBlocks& blocks) {
    const auto scale = blocks.encoded.narrow(2, 0, sizeof(float)).view(at::kFloat);
    const auto bytes = blocks.encoded.narrow(2, sizeof(float), blocks.values.size(2) * format.bits / 8);
    at::Tensor integers;
    if (format.bits == 8) {
      integers = bytes.view(at::kChar).to(at::kFloat);
    } else {
      integers = at::cat({bytes.bitwise_and(15), bytes.bitwise_right_shift(4)}, 2).bitwise_xor(8).to(at::kFloat).sub_(8);
    }
    const auto values = integers * scale;
    blocks.values.copy_(format.hadamard ? walsh_hadamard_by_operators(values) : values);
  });
}

template <bool kEncodes>
void convert_rows(const GradCommFormat& format, std::span<const RoundedRows> all) {
  if (all.empty()) return;
  const auto device = all.front().values.device();
  if (device.is_cpu()) {
    for (const RoundedRows& rows : all) convert_on_host<kEncodes>(format, rounded_part(rows));
  } else if (auto* const function = (kEncodes ? device_rounders() : device_unrounders()).of(device.type())) {
    launch_rounding(function, format, all);
  } else {
    const at::NoGradGuard no_grad;
    for (const RoundedRows& rows : all) kEncodes ? encode_by_operators(format, rows) : decode_by_operators(format, rows);
  }
}

}  // namespace

DeviceFunctions<LaunchRounding>& device_rounders() {
  static DeviceFunctions<LaunchRounding> functions;
  return functions;
}
DeviceFunctions<LaunchRounding>& device_unrounders() {
  static DeviceFunctions<LaunchRounding> functions;
  return functions;
}

void encode_rows(const GradCommFormat& format, std::span<const RoundedRows> all) { convert_rows<true>(format, all); }
void decode_rows(const GradCommFormat& format, std::span<const RoundedRows> all) { convert_rows<false>(format, all); }

at::Tensor hadamard_by_operators(const at::Tensor& blocks) {
  auto values = blocks;
  for (std::int64_t half = 1; half < blocks.size(-1); half *= 2) {
    const auto pairs = values.unflatten(-1, {-1, 2, half});
    const auto first = pairs.select(-2, 0);
    const auto second = pairs.select(-2, 1);
    values = at::stack({first + second, first - second}, -2).flatten(-3);
  }
  return values;
}

}  // namespace fsdp
