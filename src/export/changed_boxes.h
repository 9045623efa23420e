#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "export/planned_messages.h"

// Boxes of which only the changed elements travel: as positions in the flattened box (int32) and as many values.
namespace fsdp::weights {

/// How many elements of a box travel; kAllOfIt where all of them have fewer bytes without positions.
using ChangedCount = std::int32_t;
inline constexpr ChangedCount kAllOfIt = -1;

/// The bytes of a box of which so many elements travel.
std::int64_t travelling_bytes(const SentBox& box, ChangedCount count);

/// Compares a box's values, contiguous and in the dtype in which they travel, with what the receiver has, by their bits.
ChangedCount count_changed(const SentBox& box, const at::Tensor& values, const at::Tensor& saved);

/// Writes the changed elements into `bytes`, and moves `saved` on. Throws Error if they are not as many as were counted: something else
/// writes to the values.
void pack_changes(const at::Tensor& values, at::Tensor& saved, ChangedCount count, const at::Tensor& bytes);

/// Puts the changed elements of a box, as they have come in `bytes`, into `into`, which is `common`, a box within it.
void place_changes(const SentBox& box, ChangedCount count, const at::Tensor& bytes, const ckpt::Box& common, const at::Tensor& into);

}  // namespace fsdp::weights
