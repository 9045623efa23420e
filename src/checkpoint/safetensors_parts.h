#pragma once

#include <string>
#include <vector>

#include "checkpoint/dcp_metadata.h"
#include "checkpoint/safetensors.h"

namespace fsdp::ckpt {

/// torch.distributed.checkpoint writes safetensors, too (HuggingFaceStorageWriter). With save_distributed=True, each rank writes a file
/// with its parts of tensors. The metadata of the file have the places of the parts. There is no index.

/// How the names of such files begin.
inline constexpr std::string_view kSafetensorsShard = "shard-";

/// Sets SafetensorsTensor::begin of the tensors of a file, if they are parts of larger tensors according to the file's metadata. Errors
/// begin with `file`.
void place_boxes(SafetensorsHeader& header, const std::string& file);

/// A tensor of a model, which may be divided among files.
struct JoinedTensor {
  std::string name;
  DcpTensor tensor;        ///< Its parts are chunks, with the places of their data.
  std::string unreadable;  ///< The same as SafetensorsTensor::unreadable.
};

/// Joins the parts in a model's files to tensors, in the order in which they occur. Throws Error if parts of one name do not belong to one
/// tensor, for example because their dtypes differ. It does not check whether parts overlap or leave elements out.
std::vector<JoinedTensor> join_boxes(const std::vector<SafetensorsFile>& files);

}  // namespace fsdp::ckpt
