#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <string>

namespace fsdp::testing {

struct ProgramResult {
  int exit_code = -1;
  std::string output;  ///< stdout and stderr.
};

/// Runs one disabled test of this executable as a program of its own, for what a test can't do to the process that it runs in.
inline ProgramResult run_program(const std::string& disabled_test) {
  std::array<char, 4096> buffer{};
  const ssize_t length = readlink("/proc/self/exe", buffer.data(), buffer.size() - 1);
  const std::string self(buffer.data(), length > 0 ? static_cast<std::size_t>(length) : 0);
  // The one test, whichever part of the tests this process runs.
  const std::string command = "env -u GTEST_TOTAL_SHARDS -u GTEST_SHARD_INDEX '" + self +
                              "' --gtest_also_run_disabled_tests --gtest_filter='" + disabled_test + "' 2>&1";
  ProgramResult result;
  FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return result;
  for (std::size_t n = 0; (n = fread(buffer.data(), 1, buffer.size(), pipe)) > 0;) result.output.append(buffer.data(), n);
  const int status = pclose(pipe);
  if (WIFEXITED(status)) result.exit_code = WEXITSTATUS(status);
  return result;
}

}  // namespace fsdp::testing
