#include "base/parallel_copy.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "support/multi_rank.h"

// In processes of their own, as torch's threads outlive the tests.
namespace fsdp {
namespace parallel_copy_test {

using testing::run_ranks;

constexpr std::size_t kLine = 64;
constexpr unsigned char kUntouched = 0xEE;

/// The target begins at the `at`-th byte of a line of the cache.
void expect_copy(std::span<const unsigned char> source, std::size_t at) {
  std::vector<unsigned char> target(2 * kLine + source.size() + 1, kUntouched);
  const std::size_t to_line = (kLine - reinterpret_cast<std::uintptr_t>(target.data()) % kLine) % kLine;
  const auto begin = target.begin() + static_cast<std::ptrdiff_t>(to_line + at);
  const auto end = begin + static_cast<std::ptrdiff_t>(source.size());
  parallel_copy(std::to_address(begin), source.data(), static_cast<std::int64_t>(source.size()));
  const auto untouched = [](unsigned char byte) { return byte == kUntouched; };
  EXPECT_TRUE(std::equal(begin, end, source.begin())) << source.size() << " bytes at " << at;
  EXPECT_TRUE(std::all_of(target.begin(), begin, untouched)) << source.size() << " bytes at " << at;
  EXPECT_TRUE(std::all_of(end, target.end(), untouched)) << source.size() << " bytes at " << at;
}

TEST(ParallelCopy, CopiesAllBytesAndNoMore) {
  run_ranks(1, [] {
    constexpr std::size_t kMiB = std::size_t{1} << 20;
    std::vector<unsigned char> bytes(3 * kMiB);
    for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<unsigned char>(i * 2'654'435'761U >> 24);
    for (const int threads : {1, 3}) {
      at::set_num_threads(threads);
      for (const std::size_t size :
           {std::size_t{0}, std::size_t{1}, std::size_t{4096}, kMiB - 1, kMiB, kMiB + 1, kMiB + 64, 3 * kMiB - 17}) {
        for (const std::size_t source_at : {0, 3}) {
          for (const std::size_t at : {0, 1, 16, 63}) expect_copy(std::span(bytes).subspan(source_at, size), at);
        }
      }
    }
  });
}

}  // namespace parallel_copy_test
}  // namespace fsdp
