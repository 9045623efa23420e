#pragma once

#include <filesystem>

// Paths that users name: a checkpoint where a folder of checkpoints is meant, and the reverse.
namespace fsdp::ckpt {

/// Throws Error unless a checkpoint may be at `path`, of whatever format and in whatever state; it says what is there instead.
void require_checkpoint(const std::filesystem::path& path);

/// Throws Error for an empty path, and for a folder without steps that is a checkpoint itself.
void require_folder_of_steps(const std::filesystem::path& folder);

}  // namespace fsdp::ckpt
