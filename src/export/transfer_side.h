#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "export/planned_messages.h"

// What a rank brings to a transfer.
namespace fsdp::weights {

/// What this rank has of a tensor, with its values: of the box's sizes, with any strides.
struct HeldValues {
  HeldBox held;
  at::Tensor values;
};

/// What this rank wants of a tensor, and where it goes: of the box's sizes, with any strides. It may have another floating-point dtype
/// than that in which the values travel.
struct Target {
  AskedBox wanted;
  at::Tensor into;
};

/// What this rank is in a transfer.
struct TransferSide {
  std::vector<HeldValues> held;
  std::vector<Target> targets;
  std::vector<std::pair<std::string, std::string>> aliases;  ///< Other names of tensors that are tied, with the names that `held` has.
  std::string problem;                                       ///< Why this rank can't take part, as the text of an Error; empty if it can.
};

/// What all ranks say alike.
struct TransferSettings {
  std::vector<int> receivers;
  std::int64_t message_bytes = 0;
  std::chrono::milliseconds timeout = {};  ///< Of each rank.
};

/// Returns the target for a box at `offsets` (nothing: at the first element) that travels in `dtype` (nothing: in that of `into`). Throws
/// Error if it can't be.
Target target_of(const std::string& name, const at::Tensor& into, std::optional<std::vector<std::int64_t>> offsets,
                 std::optional<at::ScalarType> dtype);

/// Why this rank can't take part with this side and these settings: its own problem, or one of what it asks for. `rank` is one of `ranks`
/// in the group. Empty if it can.
std::string problem_of(const TransferSide& side, const TransferSettings& settings, int rank, int ranks);

}  // namespace fsdp::weights
