#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/types.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/temporary_folder.h"
#include "test_paths.h"

namespace fsdp::testing {

/// A process that runs scripts in Python (tests/cpp/peers/server.py). It ends with this one.
class PythonServer {
 public:
  /// That of this process. Ranks are forked, and have one of their own.
  static PythonServer& of_this_process() {
    static PythonServer* server = nullptr;
    if (server == nullptr || server->owner_ != getpid()) server = new PythonServer;
    return *server;
  }

  /// Returns the exit code.
  int run(const std::string& script, const std::vector<std::string>& arguments, int ranks) {
    std::fprintf(requests_, "%d\t%s", ranks, script.c_str());
    for (const auto& argument : arguments) std::fprintf(requests_, "\t%s", argument.c_str());
    std::fputc('\n', requests_);
    std::fflush(requests_);
    int code = -1;
    if (std::fscanf(answers_, "%d", &code) != 1) throw std::runtime_error("no answer from " + kPeerServer);
    return code;
  }

 private:
  PythonServer() {
    int to[2];    // NOLINT(modernize-avoid-c-arrays): as pipe2 takes them
    int from[2];  // NOLINT(modernize-avoid-c-arrays)
    if (pipe2(to, O_CLOEXEC) != 0 || pipe2(from, O_CLOEXEC) != 0) throw std::runtime_error("pipe2 failed");
    const char* more = std::getenv("PYTHONPATH");
    const std::string path = "PYTHONPATH=" + kPythonPackage + (more != nullptr ? std::string(":") + more : std::string());
    std::vector<std::string> words = {"env", path, kPython, "-W", "ignore", kPeerServer};
    std::vector<char*> command;
    for (auto& word : words) command.push_back(word.data());
    command.push_back(nullptr);
    posix_spawn_file_actions_t files;
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_adddup2(&files, to[0], STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&files, from[1], STDOUT_FILENO);
    pid_t process = 0;
    const int failed = posix_spawnp(&process, "env", &files, nullptr, command.data(), environ);
    posix_spawn_file_actions_destroy(&files);
    if (failed != 0) throw std::runtime_error("cannot start " + kPython);
    close(to[0]);
    close(from[1]);
    requests_ = fdopen(to[1], "w");
    answers_ = fdopen(from[0], "r");
  }

  const pid_t owner_ = getpid();
  std::FILE* requests_ = nullptr;
  std::FILE* answers_ = nullptr;
};

/// Runs one of the scripts of tests/cpp/peers on so many ranks.
inline void run_peer(const std::string& script, const std::vector<std::string>& arguments, int ranks = 1) {
  ASSERT_EQ(PythonServer::of_this_process().run(script, arguments, ranks), 0)
      << script << ::testing::PrintToString(arguments) << " on " << ranks << " ranks";
}

/// Runs a command of tests/cpp/peers/checkpoint_peer.py on a folder.
inline void run_python(const std::string& command, const std::filesystem::path& folder) {
  run_peer(kCheckpointPeer, {command, folder.string()});
}

inline std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path.string());
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace fsdp::testing
