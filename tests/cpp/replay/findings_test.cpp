#include "replay/findings.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <set>
#include <vector>

#include "replay/damage.h"
#include "replay/digest.h"

namespace findings_test {

using fsdp::replay::decide;
using fsdp::replay::Vote;
using fsdp::testing::flip_bit;

TEST(Findings, AMajorityDecides) {
  const std::vector<Vote> of_three = {{.rank = 4, .value = 1}, {.rank = 5, .value = 2}, {.rank = 6, .value = 1}};
  EXPECT_TRUE(decide(of_three).decided);
  EXPECT_EQ(decide(of_three).wrong, std::vector<std::int64_t>{5});
  EXPECT_EQ(decide(of_three).right, (std::vector<std::int64_t>{4, 6}));
  const std::vector<Vote> once = {{.rank = 0, .value = 9}, {.rank = 1, .value = 3}, {.rank = 0, .value = 3}, {.rank = 1, .value = 3}};
  EXPECT_TRUE(decide(once).decided);
  EXPECT_EQ(decide(once).wrong, std::vector<std::int64_t>{0});
  EXPECT_EQ(decide(once).right, std::vector<std::int64_t>{1});
}

TEST(Findings, NothingIsDecidedByATie) {
  const std::vector<Vote> always = {{.rank = 0, .value = 9}, {.rank = 1, .value = 3}, {.rank = 0, .value = 9}, {.rank = 1, .value = 3}};
  EXPECT_FALSE(decide(always).agreed);
  EXPECT_FALSE(decide(always).decided);
  EXPECT_TRUE(decide(always).wrong.empty());
  EXPECT_TRUE(decide(std::vector<Vote>{{.rank = 0, .value = 9}, {.rank = 1, .value = 9}}).agreed);
}

// Whatever the dtype, and where sizes are no multiple of a word.
TEST(Digest, EveryBitAndEachPieceCounts) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kDouble, at::kByte}) {
    const auto tensor = torch::arange(21, at::kFloat).to(dtype);
    const auto before = fsdp::replay::digests(tensor, 3);
    std::set<std::int64_t> seen = {fsdp::replay::digest(tensor)};
    const auto bits = static_cast<std::uint64_t>(tensor.nbytes()) * 8;
    for (std::uint64_t bit = 0; bit < bits; ++bit) {
      flip_bit(tensor, bit);
      const auto now = fsdp::replay::digests(tensor, 3);
      for (std::uint64_t piece = 0; piece < 3; ++piece) EXPECT_EQ(now[piece] != before[piece], piece == bit / (bits / 3));
      EXPECT_TRUE(seen.insert(fsdp::replay::digest(tensor)).second) << dtype << ", bit " << bit;
      flip_bit(tensor, bit);
    }
    EXPECT_EQ(fsdp::replay::digests(tensor, 3), before);
  }
}

TEST(Digest, PartsHavePlaces) {
  using fsdp::replay::with_digest;
  EXPECT_NE(with_digest(with_digest(0, 5, 0), 7, 1), with_digest(with_digest(0, 7, 0), 5, 1));
  EXPECT_EQ(with_digest(with_digest(0, 5, 0), 7, 1), with_digest(with_digest(0, 7, 1), 5, 0));
}

}  // namespace findings_test
