#pragma once

#include <string>
#include <vector>

#include "checkpoint/dcp_metadata.h"
#include "checkpoint/safetensors.h"

namespace fsdp::ckpt {

/// torch.distributed.checkpoint writes safetensors, too (HuggingFaceStorageWriter). With save_distributed=True, each rank has a file, with
/// its parts of tensors, and their places are in the file's metadata. There is no index.

/// How the names of such files begin.
inline constexpr std::string_view kSafetensorsShard = "shard-";

/// Notes where the tensors of a file begin in those that they are parts of, if its metadata say so. Errors begin with `file`.
void place_parts(SafetensorsHeader& header, const std::string& file);

/// A tensor of a model, which may be divided among files.
struct JoinedTensor {
  std::string name;
  DcpTensor tensor;        ///< Its parts are chunks, with the places of their data.
  std::string unreadable;  ///< As SafetensorsTensor::unreadable.
};

/// The tensors of a model's files, in the order in which they come. Throws Error where parts are not of one tensor: of two dtypes, say.
/// That they overlap or leave something out is not looked for.
std::vector<JoinedTensor> join_parts(const std::vector<SafetensorsFile>& files);

}  // namespace fsdp::ckpt
