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

/// What all ranks have of a parameter that is gathered by differences in blocks of four bits.
class Int4Receiver {
 public:
  /// They have received the parameter itself, in this dtype.
  Int4Receiver(const at::Tensor& main, at::ScalarType dtype, std::int64_t block, bool hadamard)
      : block_(block), hadamard_(hadamard), sizes_(main.sizes().vec()), last_(padded(main).to(dtype)) {}

  at::Tensor values() const { return last_.narrow(0, 0, c10::multiply_integers(sizes_)).view(sizes_).clone(); }

  void receive(const at::Tensor& main) {
    const auto now = padded(main);
    const auto before = last_.to(at::kFloat);
    auto after = at::empty_like(before);
    for (std::int64_t begin = 0; begin < now.numel(); begin += block_) {
      std::vector<float> difference;
      for (auto i = begin; i < begin + block_; ++i) difference.push_back(now.data_ptr<float>()[i] - before.data_ptr<float>()[i]);
      const auto received = through(difference);
      for (std::size_t i = 0; i < received.size(); ++i) {
        const auto at = begin + static_cast<std::int64_t>(i);
        after.data_ptr<float>()[at] = before.data_ptr<float>()[at] + static_cast<float>(received[i]);
      }
    }
    last_ = after.to(last_.scalar_type());
  }

  /// The scale of a block whose largest magnitude, transformed if it is, this is.
  static float scale_for(float largest) {
    const float wanted = largest * (1.0F / 7);
    auto scale = static_cast<c10::BFloat16>(wanted);
    if (static_cast<float>(scale) < wanted) ++scale.x;
    return static_cast<float>(scale);
  }

 private:
  at::Tensor padded(const at::Tensor& main) const {
    const auto values = main.detach().flatten().to(at::kFloat);
    return at::cat({values, at::zeros({(block_ - values.numel() % block_) % block_})});
  }

  /// Transforms of halves, added and subtracted.
  template <typename T>
  static std::vector<T> transform(const std::vector<T>& values) {
    if (values.size() == 1) return values;
    const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
    const auto first = transform(std::vector<T>(values.begin(), middle));
    const auto second = transform(std::vector<T>(middle, values.end()));
    std::vector<T> both;
    for (std::size_t i = 0; i < first.size(); ++i) both.push_back(first[i] + second[i]);
    for (std::size_t i = 0; i < first.size(); ++i) both.push_back(first[i] - second[i]);
    return both;
  }

  std::vector<double> through(const std::vector<float>& difference) const {
    const auto sent = hadamard_ ? transform(difference) : difference;
    float largest = 0;
    for (const auto value : sent) largest = std::max(largest, std::abs(value));
    const float scale = scale_for(largest);
    std::vector<double> integers;
    for (const auto value : sent) integers.push_back(scale == 0 ? 0 : std::nearbyint(value / scale));
    const auto received = hadamard_ ? transform(integers) : integers;
    std::vector<double> values;
    for (const auto integer : received) values.push_back(integer * scale / (hadamard_ ? static_cast<double>(block_) : 1));
    return values;
  }

  std::int64_t block_;
  bool hadamard_;
  std::vector<std::int64_t> sizes_;
  at::Tensor last_;
};

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
