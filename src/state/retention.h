#pragma once

#include <filesystem>
#include <vector>

#include "checkpoint/steps.h"
#include "fsdp/save_load.h"

namespace fsdp::state {

/// Throws Error if the options about which checkpoints are kept are invalid.
void check_retention(const SaveOptions& options);

/// Returns those of a series' complete steps, oldest first, that SaveOptions::keep_every and keep_best keep in addition to the last ones.
/// Reads the steps' metrics. Throws Error.
std::vector<std::filesystem::path> steps_that_stay(const SaveOptions& options, const std::vector<ckpt::Step>& steps);

}  // namespace fsdp::state
