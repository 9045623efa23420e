#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>

#include "support/temporary_folder.h"
#include "test_paths.h"

namespace fsdp::testing {

/// Runs a command of tests/cpp/peers/checkpoint_peer.py on a folder.
inline void run_python(const std::string& command, const std::filesystem::path& folder) {
  const std::string line = kPython + " -W ignore " + kCheckpointPeer + " " + command + " " + folder.string();
  ASSERT_EQ(std::system(line.c_str()), 0) << line;
}

inline std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path.string());
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace fsdp::testing
