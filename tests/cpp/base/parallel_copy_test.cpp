#include "base/parallel_copy.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "support/multi_rank.h"

// In processes of their own, as torch's threads outlive the tests.
namespace fsdp {
namespace parallel_copy_test {

using testing::run_ranks;

void expect_copy(std::size_t size, std::size_t source_at, std::size_t target_at, Caches caches) {
  std::vector<unsigned char> source(source_at + size);
  for (std::size_t i = 0; i < source.size(); ++i) source[i] = static_cast<unsigned char>(i * 2'654'435'761U >> 24);
  std::vector<unsigned char> target(target_at + size + 1, 0xEE);
  parallel_copy(target.data() + target_at, source.data() + source_at, static_cast<std::int64_t>(size), caches);
  EXPECT_TRUE(std::equal(source.begin() + static_cast<std::ptrdiff_t>(source_at), source.end(),
                         target.begin() + static_cast<std::ptrdiff_t>(target_at)));
  EXPECT_TRUE(std::all_of(target.begin(), target.begin() + static_cast<std::ptrdiff_t>(target_at), [](int byte) { return byte == 0xEE; }));
  EXPECT_EQ(target.back(), 0xEE);
}

TEST(ParallelCopy, CopiesAllBytesAndNoMore) {
  run_ranks(1, [] {
    for (const int threads : {1, 3}) {
      at::set_num_threads(threads);
      for (const Caches caches : {Caches::kFill, Caches::kBypass}) {
        for (const std::size_t size : {0, 1, 63, 64, 4096, 16'383, 16'384, 16'385, 70'000, 3'000'017}) {
          for (const std::size_t source_at : {0, 3}) {
            for (const std::size_t target_at : {0, 1, 16, 63}) expect_copy(size, source_at, target_at, caches);
          }
        }
      }
    }
  });
}

}  // namespace parallel_copy_test
}  // namespace fsdp
