#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "checkpoint/dcp_metadata.h"
#include "checkpoint/files.h"

namespace fsdp::ckpt {

/// The number of checked items, and all faults that were found.
struct Findings {
  std::int64_t tensors = 0;
  std::int64_t values = 0;          ///< Items that are no tensors.
  std::int64_t files = 0;           ///< The number of files that were compared with a checksum.
  bool has_checksums = false;       ///< False if Python wrote the checkpoint: the records then have checksums of their own (torch.save's).
  std::vector<std::string> faults;  ///< One line each.
  /// Items that are intact, but that only Python can read: values of types that are not plain, tensors of dtypes that are not known. One
  /// line each.
  std::vector<std::string> only_for_python = {};
};

/// Checks a checkpoint of DCP: that the sidecar's files have their sizes and checksums (without a sidecar: that the records have theirs),
/// that every record has the place, dtype and shape in the metadata, and that the boxes of each tensor hold every element exactly once.
/// Reads all files once. Faults of the files are reported in the result and never thrown.
Findings check_dcp(const std::filesystem::path& folder, FileSystem& files = FileSystem::current());

/// Describes what is wrong with the division of a tensor into boxes: boxes overlap, or leave out elements. Empty if nothing is wrong.
std::string fault_in_boxes(const DcpTensor& tensor);

}  // namespace fsdp::ckpt
