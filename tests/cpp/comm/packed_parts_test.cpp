#include "comm/collectives/packed_parts.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace fsdp::comm {
namespace packed_parts_test {

constexpr std::int64_t kLarge = 1024 * 1024;

std::vector<std::size_t> parts_of(const PackedParts& packed) {
  std::vector<std::size_t> parts;
  for (const auto& entry : packed.together()) parts.push_back(entry.part);
  return parts;
}

TEST(PackedParts, HasSmallPartsOneBehindTheOther) {
  const PackedParts packed(std::vector<std::int64_t>{12, kLarge, 100, 0, 16}, 2);
  EXPECT_EQ(parts_of(packed), (std::vector<std::size_t>{0, 2, 4}));
  EXPECT_EQ(packed.alone(), (std::vector<std::size_t>{1}));  // The empty one does not travel.
  std::int64_t end = 0;
  for (const auto& entry : packed.together()) {
    EXPECT_EQ(entry.offset % 16, 0) << "an element of any dtype may lie there";
    EXPECT_GE(entry.offset, end);
    end = entry.offset + entry.bytes;
  }
  EXPECT_EQ(packed.together()[1].bytes, 100);
  EXPECT_EQ(packed.bytes(), 16 + 112 + 16);
}

TEST(PackedParts, IsNotMadeOfOnePart) {
  const PackedParts packed(std::vector<std::int64_t>{kLarge, 12, 0}, 2);
  EXPECT_EQ(packed.together().size(), 0);
  EXPECT_EQ(packed.bytes(), 0);
  EXPECT_EQ(packed.alone(), (std::vector<std::size_t>{0, 1}));
}

TEST(PackedParts, IsOfPartsThatAreSmallOnAllRanksTogether) {
  const std::vector<std::int64_t> shards = {4096, 4096, 16};
  EXPECT_EQ(parts_of(PackedParts(shards, 2)).size(), 3);
  // Otherwise a world of a thousand ranks would copy whole models.
  const PackedParts many(shards, 1024);
  EXPECT_EQ(many.alone(), (std::vector<std::size_t>{0, 1, 2}));
}

}  // namespace packed_parts_test
}  // namespace fsdp::comm
