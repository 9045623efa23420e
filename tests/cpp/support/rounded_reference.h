#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "base/rounded_blocks.h"
#include "fsdp/grad_comm_format.h"

// What GradCommFormat promises, element by element and without encoded bytes.
namespace fsdp::testing {

/// By halves: the transform of both, their sum, and their difference.
inline std::vector<float> transformed(const std::vector<float>& values) {
  if (values.size() == 1) return values;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  const auto first = transformed({values.begin(), middle}), second = transformed({middle, values.end()});
  std::vector<float> all(values.size());
  for (std::size_t i = 0; i < first.size(); ++i) {
    all[i] = first[i] + second[i];
    all[i + first.size()] = first[i] - second[i];
  }
  return all;
}
inline std::vector<float> normalized_transform(std::vector<float> values) {
  for (float& value : values) value *= 1.0f / std::sqrt(static_cast<float>(values.size()));
  return transformed(values);
}

/// In [-0.5, 0.5), by two rounds of multiplication.
inline float random_fraction(std::uint32_t key, std::uint32_t element) {
  std::uint64_t hash = static_cast<std::uint32_t>(key + element * 2654435769ull);
  hash = static_cast<std::uint32_t>((hash ^ (hash >> 16)) * 2146121005ull);
  hash = static_cast<std::uint32_t>((hash ^ (hash >> 15)) * 2221713035ull);
  hash ^= hash >> 16;
  return static_cast<float>(static_cast<double>(hash / 256) / 16777216.0 - 0.5);
}

/// One block, as it arrives.
inline std::vector<float> rounded_block(const GradCommFormat& format, std::vector<float> values, std::uint32_t key) {
  const std::size_t numel = values.size();
  while (values.size() % 8 != 0 || (format.hadamard && (values.size() & (values.size() - 1)) != 0)) values.push_back(0);
  if (format.hadamard) values = normalized_transform(values);
  const float levels = format.bits == 8 ? 127 : 7;
  float largest = 0;
  bool finite = true;
  for (const float value : values) {
    largest = std::max(largest, std::abs(value));
    finite = finite && std::isfinite(value);
  }
  const float scale = largest / levels;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (!finite) {
      values[i] = std::numeric_limits<float>::quiet_NaN();
      continue;
    }
    float integer = 0;
    if (scale > 0) {
      const float quotient = values[i] / scale;
      integer = std::nearbyint(format.stochastic_rounding ? quotient + random_fraction(key, static_cast<std::uint32_t>(i)) : quotient);
    }
    values[i] = std::clamp(integer, -levels, levels) * scale;
  }
  if (format.hadamard) values = normalized_transform(values);
  values.resize(numel);
  return values;
}

/// A contribution, an fp32 tensor, as it arrives. `lost`: fp32 of the same size, or undefined; it is replaced.
inline at::Tensor rounded_contribution(const GradCommFormat& format, const at::Tensor& contribution, std::uint64_t key,
                                       const at::Tensor& lost) {
  const at::Tensor exact = lost.defined() ? contribution + lost : contribution.clone();
  at::Tensor arrived = at::empty_like(exact);
  const auto* from = exact.const_data_ptr<float>();
  auto* to = arrived.mutable_data_ptr<float>();
  for (std::int64_t begin = 0, number = 0; begin < exact.numel(); begin += format.block, ++number) {
    const auto count = std::min(format.block, exact.numel() - begin);
    const auto drawn = static_cast<std::uint32_t>(scrambled(key + static_cast<std::uint64_t>(number)) >> 32);
    const auto block = rounded_block(format, {from + begin, from + begin + count}, drawn);
    std::copy(block.begin(), block.end(), to + begin);
  }
  if (lost.defined()) lost.copy_((exact - arrived).nan_to_num(0, 0, 0));
  return arrived;
}

}  // namespace fsdp::testing
