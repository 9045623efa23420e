#pragma once

#include <filesystem>

// Checks of users' paths. Users may confuse a checkpoint with a folder of checkpoints.
namespace fsdp::ckpt {

/// Throws Error, which describes what exists at `path`, unless it may be a checkpoint, of any format and in any state.
void require_checkpoint(const std::filesystem::path& path);

/// Throws Error for an empty path, and for a folder without steps that is a checkpoint itself.
void require_folder_of_steps(const std::filesystem::path& folder);

}  // namespace fsdp::ckpt
