#pragma once

#include <filesystem>
#include <vector>

#include "checkpoint/steps.h"
#include "fsdp/save_load.h"

namespace fsdp::state {

/// Throws Error if what options say of checkpoints that stay has no meaning.
void check_retention(const SaveOptions& options);

/// Of a series' complete steps, oldest first: those that stay beside the last ones, by SaveOptions::keep_every and keep_best. Reads the
/// steps' metrics. Throws Error.
std::vector<std::filesystem::path> steps_that_stay(const SaveOptions& options, const std::vector<ckpt::Step>& steps);

}  // namespace fsdp::state
