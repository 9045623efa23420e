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

/// A file of a DCP checkpoint, written record by record, and what the metadata say of it. One thread at a time.
class DcpFile {
 public:
  using Append = std::function<void(std::span<const char> data)>;

  DcpFile(const std::filesystem::path& folder, const std::string& name, FileSystem& files = FileSystem::current());

  /// Bytes so far.
  std::int64_t size() const { return file_.size(); }
  /// Adds a tensor, of which add_box() adds boxes: none, where other files have them all.
  void add_tensor(const std::string& name, const DcpPath& path, Dtype dtype, const Shape& shape);
  /// Of the tensor that was added last. `write` appends all its data, row-major.
  void add_box(const Box& box, const std::function<void(const Append& append)>& write);
  void add_value(const std::string& name, const DcpPath& path, const PythonValue& value);

  /// Of what was added; after this, nothing can be.
  DcpMetadata take_metadata();
  /// Syncs and closes it.
  ListedFile finish() { return file_.finish(); }

 private:
  std::string name_;
  SummedFile file_;
  DcpMetadata metadata_;
};

/// Writes what makes files a checkpoint: `.metadata`, and the sidecar that lists `files` and it.
void seal_dcp(const std::filesystem::path& folder, const DcpMetadata& metadata, std::vector<ListedFile> listed,
              FileSystem& files = FileSystem::current());

}  // namespace fsdp::ckpt
