#pragma once

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <functional>
#include <string>
#include <type_traits>

#include "comm/launch/launch.h"

// Tests that need several ranks. A failed EXPECT_* or an exception in a rank fails the test of the parent:
//
//   TEST(Mesh, Coordinates) {
//     fsdp::testing::run_ranks(4, [](int rank) {
//       auto mesh = fsdp::init_device_mesh("cpu", {{"dp_shard", -1}});
//       EXPECT_EQ(mesh.rank(), rank);
//     });
//   }
namespace fsdp::testing {

// Ranks are forked, so the tests' own process must stay single-threaded: torch's operators would start OpenMP's threads.
inline const bool kOperatorsUseOneThread = (at::set_num_threads(1), true);

inline int failed_parts() {
  const ::testing::TestResult& result = *::testing::UnitTest::GetInstance()->current_test_info()->result();
  int failed = 0;
  for (int i = 0; i < result.total_part_count(); ++i) failed += result.GetTestPartResult(i).failed();
  return failed;
}

/// fn(), in a rank's process: 0 if no assertion failed in it.
inline int run_rank(const std::function<void(int rank)>& fn, int nproc, std::chrono::seconds timeout) {
  // A rank that hangs ends itself, and launch_local says so ("killed by signal 14 (Alarm clock)").
  alarm(static_cast<unsigned>(timeout.count()));
  const int rank = std::atoi(std::getenv("RANK"));
  const int failed_before = failed_parts();  // The parent's, before the fork.
  const ::testing::ScopedTrace trace(__FILE__, __LINE__, "in rank " + std::to_string(rank) + " of " + std::to_string(nproc));
  at::set_num_threads(1);  // The tests' operators are tiny: more threads than cores would mostly wait for each other.
  fn(rank);
  return failed_parts() == failed_before ? 0 : 1;
}

// Sanitizers make our own code that much slower, about.
#ifdef FSDP_SANITIZED
inline constexpr int kSlowdown = 5;
#else
inline constexpr int kSlowdown = 1;
#endif

/// Runs `fn` (taking the rank, or nothing) in `nproc` ranks, each a fork of this process. Fails the current test if a rank throws, fails
/// an assertion, dies, or takes longer than `timeout`: then it hangs. (So far above what a test takes that busy machines do not matter.)
template <typename Fn>
void run_ranks(int nproc, const Fn& fn, std::chrono::seconds timeout = std::chrono::seconds(120)) {
  timeout *= kSlowdown;
  ASSERT_TRUE(comm::is_single_threaded()) << "run_ranks() forks, but something in this test has started threads";
  const std::function<void(int)> body = [&](int rank) {
    if constexpr (std::is_invocable_v<Fn, int>) {
      fn(rank);
    } else {
      fn();
    }
  };
  EXPECT_EQ(comm::launch_ranks(nproc, [&] { return run_rank(body, nproc, timeout); }, {.grace = std::chrono::seconds(5)}), 0);
}

}  // namespace fsdp::testing
