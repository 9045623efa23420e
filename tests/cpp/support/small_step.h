#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "checkpoint/commit.h"
#include "support/python_peer.h"

namespace fsdp::testing {

/// Saves a step of two files that hold `content`.
inline void save_step(const std::filesystem::path& target, const std::string& content, ckpt::FileSystem& files = ckpt::FileSystem::real()) {
  const ckpt::TemporaryStep lease = ckpt::begin_step(target, files);
  const std::filesystem::path& temporary = lease.path();
  std::vector<ckpt::ListedFile> listed;
  for (const char* name : {"__0_0.distcp", ".metadata"}) {
    ckpt::SummedFile file(temporary, name, files);
    file.append(content);
    listed.push_back(file.finish());
  }
  ckpt::seal_step(temporary, listed, files);
  ckpt::remove_tree(ckpt::commit_step(temporary, target, files), files);
}

/// The content of a step, both files of which must hold it.
inline std::string content_of_step(const std::filesystem::path& step) {
  ckpt::verify_step(step);
  EXPECT_EQ(read_file(step / ".metadata"), read_file(step / "__0_0.distcp"));
  return read_file(step / ".metadata");
}

}  // namespace fsdp::testing
