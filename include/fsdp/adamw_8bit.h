#pragma once

#include <cstdint>
#include <tuple>
#include <vector>

#include "fsdp/optim.h"

namespace fsdp {

/// Options of AdamW8bit: those of AdamW, and which parameters have 8-bit state.
struct AdamW8bitOptions {
  double lr = 1e-3;                                 ///< Learning rate.
  std::tuple<double, double> betas = {0.9, 0.999};  ///< Decay of the averages of the gradient and of its square.
  double eps = 1e-8;                                ///< Added to the denominator.
  double weight_decay = 1e-2;                       ///< Times the learning rate.
  /// Parameters with fewer elements keep their state in full precision: they hardly matter for memory, and norms and biases are sensitive.
  std::int64_t min_8bit_size = 4096;
};

/// AdamW whose two states take one byte per element each (Dettmers et al., 2022). For each block of 256 elements, the largest magnitude is
/// kept in fp32. Each element is divided by it and kept as the nearest of 256 numbers, which lie denser towards zero ("dynamic" map; signed
/// for the first moment, unsigned for the second). The state takes 2 + 8/256 bytes per element instead of 8. Parameters and gradients keep
/// their dtypes, and updates are computed in fp32.
///
/// Blocks are counted from the start of each parameter and never lie on two ranks, so the result does not depend on the sharding:
///
///     fsdp::fully_shard(*model, {.units = ..., .granularity = [](const auto&, const auto&) { return fsdp::Granularity::blocks(256); }});
///     fsdp::AdamW8bit optimizer(*model, {.lr = 1e-3});
///
/// Parameters of double precision keep their state in full precision, too. It works on the CPU, and on GPUs in builds with
/// kernels (docs/run/gpu.md).
class AdamW8bit : public Optimizer {
 public:
  /// Elements that share a largest magnitude.
  static constexpr std::int64_t kBlock = 256;

  /// Throws Error if an option is out of range, if a parameter with 8-bit state is cut within a block, or on a device without a kernel for
  /// it.
  AdamW8bit(torch::nn::Module& module, AdamW8bitOptions options = {}, std::vector<ParamGroup> groups = {});
};

}  // namespace fsdp
