#pragma once

#include <array>
#include <cstdint>

#include "optim/dynamic_map.h"

namespace fsdp::optim {

/// Elements that share a largest magnitude.
inline constexpr std::int64_t kBlock = 256;
using Block = std::array<float, kBlock>;

/// What an AdamW step needs of its options.
struct BlockAdamW {
  float beta1 = 0;
  float beta2 = 0;
  float eps = 0;
  float decay = 0;         ///< 1 - lr * weight_decay.
  float step_size = 0;     ///< lr over the first moment's bias correction.
  float second_scale = 0;  ///< One over the root of the second moment's bias correction.
};

/// One of the two moments of a block: codes for its elements divided by the largest magnitude, whose sign it has not.
struct BlockMoment {
  const DynamicMap* map;
  std::uint8_t* codes;
  float* largest;
};

/// One AdamW step on the first `numel` elements of a block; what lies beyond them in `value` is not defined after. Needs no torch: a file
/// of its own, for compiler options of its own.
void update_block(const BlockAdamW& adamw, const Block& gradient, Block& value, BlockMoment first, BlockMoment second, std::int64_t numel);

}  // namespace fsdp::optim
