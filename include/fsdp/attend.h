#pragma once

#include <torch/nn/module.h>

namespace fsdp {

/// Options of attend().
struct AttendOptions {
  /// Divide the sum of gradients by the number of ranks that were present, and not by the number of all ranks. The same on all ranks.
  bool divide_by_present = false;
};

/// Says whether this rank uses a module in this forward: a rank may have no images for a vision tower, or no tokens for an expert. Call it
/// on every rank of the module's mesh, before the module is used or skipped, every time. The ranks exchange it in one small message.
///
/// Afterwards, a rank with `present` = false skips the module. It sends its shards to the others, receives nothing, and counts as zero in
/// the sum of gradients: the result has the same bits as if it had run a pass whose gradients are zero. If no rank is present, nothing is
/// sent, and the parameters have no gradient. Ranks that are present compute as usual. If not all are, the module's units stay gathered on
/// them until the end of backward, where their gradients are reduced.
///
/// It applies to the units whose parameters all lie in the module. In a forward that activation checkpointing repeats, it does nothing.
/// Throws Error if the module contains no unit, if the ranks' options differ, or if the unit has a gradient divide factor beside
/// `divide_by_present`. A rank that uses a module that it has said to skip gets an Error.
void attend(const torch::nn::Module& module, bool present, const AttendOptions& options = {});

}  // namespace fsdp
