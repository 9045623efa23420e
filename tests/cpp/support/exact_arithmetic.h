#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

// What the library computes, written out as its documents give it: shares no code with it.
namespace fsdp::testing {

/// What arrives of fp32 values that travel in blocks of eight bits: element by element, with c10's conversion.
inline at::Tensor through_float8(const at::Tensor& main, std::int64_t block) {
  auto values = main.detach().flatten().clone();
  auto* data = values.data_ptr<float>();
  for (std::int64_t begin = 0; begin < values.numel(); begin += block) {
    const auto end = std::min(begin + block, values.numel());
    float largest = 0;
    for (auto i = begin; i < end; ++i) largest = std::max(largest, std::abs(data[i]));
    float scale = std::ldexp(1.0F, -127);
    while (largest / scale > 448) scale *= 2;
    for (auto i = begin; i < end; ++i) data[i] = static_cast<float>(c10::Float8_e4m3fn(data[i] / scale)) * scale;
  }
  return values.view(main.sizes());
}

/// A sum in the order of the ranks: neighbours in pairs, again and again.
inline at::Tensor sum_in_pairs(std::vector<at::Tensor> terms) {
  while (terms.size() > 1) {
    std::vector<at::Tensor> pairs;
    for (std::size_t r = 0; r < terms.size(); r += 2) pairs.push_back(r + 1 < terms.size() ? terms[r] + terms[r + 1] : terms[r]);
    terms = std::move(pairs);
  }
  return terms[0];
}

}  // namespace fsdp::testing
