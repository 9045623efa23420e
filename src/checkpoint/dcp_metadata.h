#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "checkpoint/boxes.h"
#include "checkpoint/dtype.h"

namespace fsdp::ckpt {

/// The file of a DCP folder that lists its contents and their places.
inline constexpr std::string_view kMetadataFile = ".metadata";
/// The largest accepted size of that file, bytes. A larger one is taken for a mistake.
inline constexpr std::int64_t kMostMetadata = std::int64_t{1} << 32;

/// The record of one item: `length` bytes at `offset` of a file of the folder.
struct RecordLocation {
  std::string file;
  std::int64_t offset = 0;
  std::int64_t length = 0;

  bool operator==(const RecordLocation&) const = default;
};

/// A tensor, stored as boxes. DCP finds a box's record by the tensor's name and the box's offsets. A box without elements may have no
/// record: its file is empty.
struct DcpTensor {
  struct Chunk {
    Box box;
    RecordLocation record;

    bool operator==(const Chunk&) const = default;
  };
  Dtype dtype = Dtype::float32;
  Shape shape;
  std::vector<Chunk> chunks;

  bool operator==(const DcpTensor&) const = default;
};

/// Anything else, as torch.save writes it.
struct DcpObject {
  RecordLocation record;

  bool operator==(const DcpObject&) const = default;
};

/// A tensor that this library cannot read, for example because it does not know its dtype.
struct DcpUnreadable {
  std::string why;

  bool operator==(const DcpUnreadable&) const = default;
};

struct DcpItem {
  std::string name;
  std::variant<DcpTensor, DcpObject, DcpUnreadable> content;

  bool operator==(const DcpItem&) const = default;
};

/// The path by which a nested state dict leads to an item. In {"model": {"layers": [w]}}, the item "model.layers.0" has the path model,
/// layers, 0.
using DcpPath = std::vector<std::variant<std::string, std::int64_t>>;

struct DcpMetadata {
  /// The items in the order of the state dict, each name once.
  std::vector<DcpItem> items;
  std::vector<std::pair<std::string, DcpPath>> paths;

  bool operator==(const DcpMetadata&) const = default;
};

/// Reads the text of a `.metadata` file, as torch 2.11 and later write it. It checks that boxes lie in their tensors, that each box has a
/// record (a box without elements may have none), and that records name files of the folder itself. It does not check whether the boxes
/// cover a tensor and whether the files exist; reading them shows that. A tensor of an unknown dtype is a DcpUnreadable. Throws Error,
/// which begins with `file`.
DcpMetadata read_dcp_metadata(std::string_view data, const std::string& file);

/// Returns the text of a `.metadata` file that torch.distributed.checkpoint's FileSystemReader reads. Throws Error for a DcpUnreadable.
std::string write_dcp_metadata(const DcpMetadata& metadata);

}  // namespace fsdp::ckpt
