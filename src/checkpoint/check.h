#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "checkpoint/dcp_metadata.h"
#include "checkpoint/files.h"

namespace fsdp::ckpt {

/// What was looked at, and all that is wrong with it.
struct Findings {
  std::int64_t tensors = 0;
  std::int64_t values = 0;          ///< Items that are no tensors.
  std::int64_t files = 0;           ///< With a checksum.
  bool has_checksums = false;       ///< False for what Python wrote, where the records have their own (torch.save's).
  std::vector<std::string> faults;  ///< One line each.
  /// What is whole, but cannot be read here: values of other types than plain ones, tensors of dtypes that are not known. One line each.
  std::vector<std::string> only_for_python = {};
};

/// Checks a checkpoint of DCP: that the sidecar's files have their sizes and checksums (without a sidecar: that the records have theirs),
/// that every record is where the metadata say and is of that dtype and shape, and that the boxes of each tensor hold every element exactly
/// once. Reads all files once, and never throws for what it finds there.
Findings check_dcp(const std::filesystem::path& folder, FileSystem& files = FileSystem::current());

/// What is wrong with how a tensor is divided: boxes that overlap, or leave out elements. Empty if nothing is.
std::string fault_in_boxes(const DcpTensor& tensor);

}  // namespace fsdp::ckpt
