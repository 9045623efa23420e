#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "checkpoint/commit.h"
#include "state/snapshot.h"

namespace fsdp::state {

/// A file of a checkpoint that a rank has written.
struct RankFile {
  ckpt::ListedFile listed;
  std::string text;  ///< Describes it for join_files(), with its part of the metadata.
};

/// The name of a rank's file.
std::string name_of_file(std::int64_t rank);

/// Writes a rank's records into a folder.
RankFile write_records(const std::filesystem::path& folder, const Snapshot& snapshot, std::int64_t rank);

/// What the files of all ranks are together.
struct JoinedFiles {
  std::string metadata;
  std::vector<ckpt::ListedFile> listed;
};
/// Joins the texts of all ranks' files. Throws Error unless the boxes of every tensor contain each element exactly once.
JoinedFiles join_files(const std::vector<std::string>& texts);

}  // namespace fsdp::state
