#include "comm/bundle.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace fsdp::comm {
namespace bundle_test {

constexpr std::int64_t kLarge = 1024 * 1024;

std::vector<std::size_t> parts_of(const Bundle& bundle) {
  std::vector<std::size_t> parts;
  for (const auto& entry : bundle.together()) parts.push_back(entry.part);
  return parts;
}

TEST(Bundle, HasSmallPartsOneBehindTheOther) {
  const Bundle bundle(std::vector<std::int64_t>{12, kLarge, 100, 0, 16}, 2);
  EXPECT_EQ(parts_of(bundle), (std::vector<std::size_t>{0, 2, 4}));
  EXPECT_EQ(bundle.alone(), (std::vector<std::size_t>{1}));  // The empty one does not travel.
  std::int64_t end = 0;
  for (const auto& entry : bundle.together()) {
    EXPECT_EQ(entry.offset % 16, 0) << "an element of any dtype may lie there";
    EXPECT_GE(entry.offset, end);
    end = entry.offset + entry.bytes;
  }
  EXPECT_EQ(bundle.together()[1].bytes, 100);
  EXPECT_EQ(bundle.bytes(), 16 + 112 + 16);
}

TEST(Bundle, IsNotMadeOfOnePart) {
  const Bundle bundle(std::vector<std::int64_t>{kLarge, 12, 0}, 2);
  EXPECT_EQ(bundle.together().size(), 0);
  EXPECT_EQ(bundle.bytes(), 0);
  EXPECT_EQ(bundle.alone(), (std::vector<std::size_t>{0, 1}));
}

TEST(Bundle, IsOfPartsThatAreSmallOnAllRanksTogether) {
  const std::vector<std::int64_t> shards = {4096, 4096, 16};
  EXPECT_EQ(parts_of(Bundle(shards, 2)).size(), 3);
  // Otherwise a world of a thousand ranks would copy whole models.
  const Bundle many(shards, 1024);
  EXPECT_EQ(many.alone(), (std::vector<std::size_t>{0, 1, 2}));
}

}  // namespace bundle_test
}  // namespace fsdp::comm
