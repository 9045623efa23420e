#pragma once

#include <algorithm>
#include <filesystem>
#include <functional>
#include <string>

#include "checkpoint/commit.h"
#include "checkpoint/dcp_metadata.h"
#include "support/python_peer.h"

namespace fsdp::testing {

/// Changes what a checkpoint's metadata say, by a process that is no rank. The checkpoint has no checksums afterwards, like Python's.
template <typename Change>
void edit_metadata(const std::filesystem::path& step, const Change& change) {
  const auto file = step / ckpt::kMetadataFile;
  auto metadata = ckpt::read_dcp_metadata(read_file(file), file.string());
  change(metadata);
  ckpt::write_whole(file, ckpt::write_dcp_metadata(metadata));
  std::filesystem::remove(step / ckpt::kSidecar);
}

/// Takes an item out.
inline void remove_item(const std::filesystem::path& step, const std::string& name) {
  edit_metadata(step, [&](ckpt::DcpMetadata& metadata) {
    const auto count = std::erase_if(metadata.items, [&](const ckpt::DcpItem& item) { return item.name == name; });
    EXPECT_EQ(count, 1U) << name;
    std::erase_if(metadata.paths, [&](const auto& path) { return path.first == name; });
  });
}

/// Gives an item another name.
inline void rename_items(const std::filesystem::path& step, const std::function<std::string(const std::string& name)>& renamed) {
  edit_metadata(step, [&](ckpt::DcpMetadata& metadata) {
    for (auto& item : metadata.items) item.name = renamed(item.name);
    metadata.paths.clear();
  });
}

}  // namespace fsdp::testing
