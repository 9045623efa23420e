#pragma once

#include <chrono>
#include <functional>

// The implementation of fsdp::launch_local, with options that only tests use.
namespace fsdp::comm {

struct LaunchDetails {
  /// After the first failure the other ranks get this long to fail by themselves, so that their own messages come out.
  std::chrono::milliseconds grace = std::chrono::seconds(10);
  bool prefix_output = false;  ///< See fsdp::LaunchOptions.
  int max_restarts = 0;        ///< See there.
};

/// fsdp::launch_local with these options.
int launch_ranks(int nproc, const std::function<int()>& fn, const LaunchDetails& details);

/// True if this process has one thread, so that a forked copy of it works: locks held by other threads would stay locked in the copy.
bool is_single_threaded();

}  // namespace fsdp::comm
