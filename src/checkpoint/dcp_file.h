#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/commit.h"
#include "checkpoint/dcp_metadata.h"
#include "checkpoint/files.h"
#include "checkpoint/python_value.h"

namespace fsdp::ckpt {

/// Writes a file of a DCP checkpoint, record by record, and collects its metadata. One thread at a time.
class DcpFile {
 public:
  using Append = std::function<void(std::span<const char> data)>;

  DcpFile(const std::filesystem::path& folder, const std::string& name, FileSystem& files = FileSystem::current());

  /// Bytes so far.
  std::int64_t size() const { return file_.size(); }
  /// Adds a tensor, whose boxes are then added by add_box(). It may have no boxes, if other files contain all of them.
  void add_tensor(const std::string& name, const DcpPath& path, Dtype dtype, const Shape& shape);
  /// Adds a box of the tensor that was added last. `write` appends all data of the box, in row-major order.
  void add_box(const Box& box, const std::function<void(const Append& append)>& write);
  void add_value(const std::string& name, const DcpPath& path, const PythonValue& value);

  /// Returns the metadata of all that was added. Nothing can be added after this call.
  DcpMetadata take_metadata();
  /// Syncs and closes the file.
  ListedFile finish() { return file_.finish(); }

 private:
  std::string name_;
  SummedFile file_;
  DcpMetadata metadata_;
};

/// Makes a folder of files a checkpoint: writes `.metadata` with this text (write_dcp_metadata()), and the sidecar, which lists `listed`
/// and
/// `.metadata`. `saved`: see seal_step().
void seal_dcp(const std::filesystem::path& folder, const std::string& metadata, std::vector<ListedFile> listed,
              FileSystem& files = FileSystem::current(), std::int64_t saved = 0);

}  // namespace fsdp::ckpt
