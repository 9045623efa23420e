#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "host_clock.h"
#include "support/on_device.h"

// What one thread of the host has waited for, another one knows if it was told.
namespace threads_test {

using fsdp::testing::current_stream;
using fsdp::testing::expect_report;
using fsdp::testing::order;
using fsdp::testing::side_stream;
using sim::device;

/// Two threads: one computes on a side stream, waits for it, and calls `tell`; the other one calls `hear`, and uses the result.
template <typename Tell, typename Hear>
void hand_over(const Tell& tell, const Hear& hear) {
  const auto side = side_stream();
  const auto value = at::ones({1000}, device());
  order(current_stream(), side);
  std::atomic<bool> has_begun = false;
  std::atomic<bool> is_computed = false;
  std::thread other([&] {
    sim::now();  // From here on, it learns what it is told.
    has_begun = true;
    while (!is_computed) std::this_thread::yield();
    hear();
    value.add_(1);
  });
  while (!has_begun) std::this_thread::yield();
  {
    const c10::StreamGuard on_side(side);
    value.mul_(2);
  }
  side.synchronize();
  tell();
  is_computed = true;
  other.join();
  order(side, current_stream());
}

class Threads : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!sim::hand_overs_are_seen()) GTEST_SKIP() << "threads have one clock in this build";
  }
};

TEST_F(Threads, KnowNothingByChance) {
  hand_over([] {}, [] {});
  expect_report("write after write: 'aten::add_'");
}

TEST_F(Threads, TellByMutexes) {
  std::mutex mutex;
  const auto lock = [&] { const std::lock_guard locked(mutex); };
  hand_over(lock, lock);
}

TEST_F(Threads, TellByConditionVariables) {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_told = false;
  hand_over(
      [&] {
        const std::lock_guard lock(mutex);
        is_told = true;
        changed.notify_one();
      },
      [&] {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return is_told; });
      });
}

TEST_F(Threads, TellByTheirEnd) {
  const auto side = side_stream();
  const auto value = at::ones({1000}, device());
  order(current_stream(), side);
  std::thread([&] {
    {
      const c10::StreamGuard on_side(side);
      value.mul_(2);
    }
    side.synchronize();
  }).join();
  EXPECT_EQ(value.sum().item<float>(), 2000);
}

TEST_F(Threads, MayHaveOneClock) {
  sim::use_one_host_clock(true);
  hand_over([] {}, [] {});
  sim::use_one_host_clock(false);
}

}  // namespace threads_test
