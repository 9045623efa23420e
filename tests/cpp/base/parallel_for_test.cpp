#include "base/parallel_for.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "support/multi_rank.h"

// In processes of their own, as torch's threads outlive the tests.
namespace fsdp {
namespace parallel_for_test {

using testing::run_ranks;

class Ranges {
 public:
  void add(std::int64_t begin, std::int64_t end) {
    const std::lock_guard<std::mutex> lock(mutex_);
    ranges_.emplace_back(begin, end);
    threads_.insert(std::this_thread::get_id());
  }
  std::size_t threads() const { return threads_.size(); }
  std::size_t count() const { return ranges_.size(); }
  void expect_all_once(std::int64_t count) {
    std::sort(ranges_.begin(), ranges_.end());
    std::int64_t next = 0;
    for (const auto& [begin, end] : ranges_) {
      EXPECT_EQ(begin, next);
      EXPECT_GT(end, begin);
      next = end;
    }
    EXPECT_EQ(next, count);
  }

 private:
  std::mutex mutex_;  // Threads add at once.
  std::vector<std::pair<std::int64_t, std::int64_t>> ranges_;
  std::set<std::thread::id> threads_;
};

TEST(ParallelFor, RangesAreAllOfItOnce) {
  run_ranks(1, [] {
    for (const int threads : {1, 3}) {
      at::set_num_threads(threads);
      for (const std::int64_t count : {0, 1, 9, 10, 11, 35, 1'000'001}) {
        Ranges ranges;
        parallel_for(count, /*grain=*/10, [&](std::int64_t begin, std::int64_t end) { ranges.add(begin, end); });
        ranges.expect_all_once(count);
      }
    }
  });
}

TEST(ParallelFor, TakesAsManyThreadsAsTorchHas) {
  run_ranks(1, [] {
    at::set_num_threads(3);
    Ranges many;
    parallel_for(1000, /*grain=*/10, [&](std::int64_t begin, std::int64_t end) { many.add(begin, end); });
    EXPECT_EQ(many.threads(), 3U);
    Ranges two;
    parallel_for(20, /*grain=*/10, [&](std::int64_t begin, std::int64_t end) { two.add(begin, end); });
    EXPECT_EQ(two.threads(), 2U);
    Ranges one;
    parallel_for(10, /*grain=*/10, [&](std::int64_t begin, std::int64_t end) { one.add(begin, end); });
    EXPECT_EQ(one.count(), 1U);
  });
}

TEST(ParallelFor, OneWithinAnotherIsAPlainCall) {
  run_ranks(1, [] {
    at::set_num_threads(2);
    parallel_for(2, /*grain=*/1, [](std::int64_t, std::int64_t) {
      Ranges inner;
      parallel_for(1000, /*grain=*/1, [&](std::int64_t begin, std::int64_t end) { inner.add(begin, end); });
      EXPECT_EQ(inner.count(), 1U);
    });
  });
}

TEST(ParallelFor, ThrowsWhatARangeThrows) {
  run_ranks(1, [] {
    for (const int threads : {1, 3}) {
      at::set_num_threads(threads);
      EXPECT_THROW(parallel_for(1000, 1, [](std::int64_t, std::int64_t) { throw std::length_error("a range"); }), std::length_error);
    }
  });
}

}  // namespace parallel_for_test
}  // namespace fsdp
