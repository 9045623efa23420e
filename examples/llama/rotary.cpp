#include "llama/rotary.h"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <numbers>

namespace llama {
namespace {

/// By how much each pair of a head's elements turns per position, [head_dim / 2] in fp32, in a sequence of `length`.
class Frequencies {
 public:
  Frequencies(double theta, std::int64_t head_dim, std::int64_t length, at::Device device)
      : theta_(theta), head_dim_(head_dim), length_(length), options_(at::device(device).dtype(at::kFloat)) {}

  at::Tensor operator()(std::monostate) const { return plain(theta_); }

  at::Tensor operator()(const LinearRope& rope) const { return plain(theta_) / rope.factor; }

  at::Tensor operator()(const DynamicRope& rope) const {
    const auto stretched = static_cast<double>(std::max(length_, rope.trained)) / static_cast<double>(rope.trained);
    const auto width = static_cast<double>(head_dim_);
    return plain(theta_ * std::pow(rope.factor * stretched - (rope.factor - 1), width / (width - 2)));
  }

  at::Tensor operator()(const Llama3Rope& rope) const {
    // Those between slow and fast are mixtures, by the turns within the original length.
    const auto turns = plain(theta_) * (rope.trained / (2 * std::numbers::pi));
    return mixed(((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1), rope.factor);
  }

  at::Tensor operator()(const YarnRope& rope) const {
    // The pair that turns so often within the original length.
    const auto pair_of = [&](double turns) {
      return static_cast<double>(head_dim_) * std::log(rope.trained / (turns * 2 * std::numbers::pi)) / (2 * std::log(theta_));
    };
    auto low = pair_of(rope.beta_fast);
    auto high = pair_of(rope.beta_slow);
    if (rope.truncates) {
      low = std::floor(low);
      high = std::ceil(high);
    }
    low = std::max(low, 0.0);
    high = std::min(high, static_cast<double>(head_dim_ - 1));
    if (low == high) high += 0.001;
    return mixed(1 - ((at::arange(head_dim_ / 2, options_) - low) / (high - low)).clamp(0, 1), rope.factor);
  }

  at::Tensor operator()(const ProportionalRope& rope) const {
    const auto rotated = static_cast<std::int64_t>(rope.part * static_cast<double>(head_dim_) / 2);
    auto turns = plain(theta_) / rope.factor;
    turns.narrow(0, rotated, head_dim_ / 2 - rotated).zero_();
    return turns;
  }

 private:
  at::Tensor plain(double theta) const { return 1.0 / at::pow(theta, at::arange(0, head_dim_, 2, options_) / head_dim_); }
  /// `kept` of each plain turn, and the rest of it slowed down.
  at::Tensor mixed(const at::Tensor& kept, double factor) const {
    const auto turns = plain(theta_);
    return turns * kept + turns / factor * (1 - kept);
  }

  double theta_;
  std::int64_t head_dim_;
  std::int64_t length_;
  at::TensorOptions options_;
};

}  // namespace

Rotary rotary_of(const Rope& rope, std::int64_t head_dim, const at::Tensor& x, std::int64_t first, std::int64_t length) {
  const auto positions = at::arange(first, first + x.size(1), at::device(x.device()).dtype(at::kFloat));
  const auto angles = at::outer(positions, std::visit(Frequencies(rope.theta, head_dim, length, x.device()), rope.scaling)).repeat({1, 2});
  const auto* yarn = std::get_if<YarnRope>(&rope.scaling);
  const auto size = yarn == nullptr ? 1.0 : yarn->attention_factor;
  return {(angles.cos() * size).to(x.scalar_type()), (angles.sin() * size).to(x.scalar_type())};
}

at::Tensor rotate(const at::Tensor& x, const Rotary& rotary) {
  const auto halves = x.chunk(2, -1);
  return x * rotary.cos + at::cat({-halves[1], halves[0]}, -1) * rotary.sin;
}

}  // namespace llama
