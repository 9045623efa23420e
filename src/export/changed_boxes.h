#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "export/planned_messages.h"

// Boxes of which only the changed elements are sent: as positions in the flattened box (int32) and as many values.
namespace fsdp::weights {

/// How many elements of a box are sent; kAllOfIt if the complete box has fewer bytes.
using ChangedCount = std::int32_t;
inline constexpr ChangedCount kAllOfIt = -1;

/// The bytes of a box of which this many elements are sent.
std::int64_t travelling_bytes(const SentBox& box, ChangedCount count);

/// Compares a box's values, contiguous and in the dtype in which they are sent, bit by bit with the receiver's values.
ChangedCount count_changed(const SentBox& box, const at::Tensor& values, const at::Tensor& saved);

/// Writes the changed elements into `bytes`, and updates `saved`. Throws Error if their number differs from the count, because the values
/// were written meanwhile.
void pack_changes(const at::Tensor& values, at::Tensor& saved, ChangedCount count, const at::Tensor& bytes);

/// Writes the changed elements of a box, which have arrived in `bytes`, into `into`, which is `common`, a box within it.
void place_changes(const SentBox& box, ChangedCount count, const at::Tensor& bytes, const ckpt::Box& common, const at::Tensor& into);

}  // namespace fsdp::weights
