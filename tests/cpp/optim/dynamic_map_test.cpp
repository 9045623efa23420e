#include "optim/dynamic_map.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "support/brute_force_map.h"

namespace fsdp {
namespace dynamic_map_test {

using optim::DynamicMap;
using testing::BruteForceMap;

TEST(DynamicMap, HoldsTheNumbersOfThePaper) {
  for (const bool is_signed : {true, false}) {
    const DynamicMap map(is_signed);
    const BruteForceMap expected(is_signed);
    ASSERT_EQ(expected.values.size(), 256U);
    for (int code = 0; code < 256; ++code) {
      EXPECT_EQ(map.decode(static_cast<std::uint8_t>(code)), expected.values[static_cast<std::size_t>(code)]) << code;
    }
    EXPECT_EQ(map.decode(static_cast<std::uint8_t>(map.encode(0))), 0);
    EXPECT_EQ(map.decode(255), 1);
  }
}

// At every boundary between two codes, the floats around it; and floats of every size.
TEST(DynamicMap, EncodesToTheNearest) {
  for (const bool is_signed : {true, false}) {
    const DynamicMap map(is_signed);
    const BruteForceMap expected(is_signed);
    std::vector<float> samples = {0.0F, -0.0F, 1.0F, std::numeric_limits<float>::min(), std::numeric_limits<float>::denorm_min()};
    for (std::size_t code = 0; code + 1 < 256; ++code) {
      const float middle = (expected.values[code] + expected.values[code + 1]) / 2;
      float x = middle;
      for (int k = 0; k < 8; ++k) x = std::nextafter(x, -2.0F);
      for (int k = 0; k < 16; ++k, x = std::nextafter(x, 2.0F)) samples.push_back(x);
      samples.push_back(expected.values[code]);
    }
    std::uint32_t bits = 1;
    while (bits < 0x3F800000U) {
      float x = 0;
      std::memcpy(&x, &bits, sizeof(x));
      samples.push_back(x);
      if (is_signed) samples.push_back(-x);
      bits += 9973;
    }
    if (is_signed) samples.push_back(-1.0F);
    std::size_t wrong = 0;
    for (const float x : samples) {
      if (x < -1 || x > 1 || (!is_signed && x < 0)) continue;
      wrong += map.encode(x) == expected.nearest(x) ? 0 : 1;
    }
    EXPECT_EQ(wrong, 0U) << "of " << samples.size();
  }
}

TEST(DynamicMap, NaNHasSomeCode) {
  for (const bool is_signed : {true, false}) {
    const DynamicMap map(is_signed);
    for (const float x : {std::nanf(""), -std::nanf(""), std::numeric_limits<float>::infinity()}) {
      EXPECT_GE(map.encode(x), 0);
      EXPECT_LE(map.encode(x), 255);
    }
  }
}

}  // namespace dynamic_map_test
}  // namespace fsdp
