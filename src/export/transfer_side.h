#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "export/planned_messages.h"

// The contribution of a rank to a transfer.
namespace fsdp::weights {

/// The part of a tensor that this rank has, with its values: of the box's sizes, with any strides.
struct HeldValues {
  HeldBox held;
  at::Tensor values;
};

/// The part of a tensor that this rank wants, and its destination: of the box's sizes, with any strides. The destination may have another
/// floating-point dtype than the one in which the values are sent.
struct Target {
  AskedBox wanted;
  at::Tensor into;
};

/// This rank's side of a transfer.
struct TransferSide {
  std::vector<HeldValues> held;
  std::vector<Target> targets;
  std::vector<std::pair<std::string, std::string>> aliases;  ///< Other names of tensors that are tied, with the names that `held` has.
  std::string problem;                                       ///< Why this rank can't take part, as the text of an Error; empty if it can.
};

/// The settings that are the same on all ranks.
struct TransferSettings {
  std::vector<int> receivers;
  std::int64_t message_bytes = 0;
  std::chrono::milliseconds timeout = {};  ///< Of each rank.
};

/// Returns the target for a box at `offsets` (nothing: at the first element) that is sent in `dtype` (nothing: in that of `into`). Throws
/// Error if this is not possible.
Target target_of(const std::string& name, const at::Tensor& into, std::optional<std::vector<std::int64_t>> offsets,
                 std::optional<at::ScalarType> dtype);

/// Returns why this rank can't take part with this side and these settings: its own problem, or one of its requests. `rank` is one of
/// `ranks` in the group. Empty if it can.
std::string problem_of(const TransferSide& side, const TransferSettings& settings, int rank, int ranks);

}  // namespace fsdp::weights
