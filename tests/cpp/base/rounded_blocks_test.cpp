// Integers of 8 or 4 bits with a scale for each block: sizes, what becomes of single values, and formats that do not exist. Whole sums are
// compared with a reference in tests/cpp/comm/rounded_sum_test.cpp.

#include "base/rounded_blocks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "support/messages.h"

namespace fsdp {
namespace rounded_blocks_test {

/// As they arrive.
std::vector<float> sent(const GradCommFormat& format, std::vector<float> values, std::uint64_t key = 0) {
  const auto numel = static_cast<std::int64_t>(values.size());
  const auto room = (values.size() / static_cast<std::size_t>(format.block) + 1) * static_cast<std::size_t>(format.block);
  values.resize(room);
  std::vector<std::uint8_t> encoded(static_cast<std::size_t>(encoded_bytes(format, numel)));
  encode_blocks(format, values.data(), numel, key, 0, nullptr, encoded.data());
  std::vector<float> arrived(room);
  decode_blocks(format, encoded.data(), numel, arrived.data());
  arrived.resize(static_cast<std::size_t>(numel));
  return arrived;
}

TEST(RoundedBlocks, TakeSoManyBytes) {
  EXPECT_EQ(encoded_bytes({.bits = 8, .block = 128}, 1280), 10 * 132);
  EXPECT_EQ(encoded_bytes({.bits = 4, .block = 128}, 1280), 10 * 68);
  EXPECT_EQ(encoded_bytes({.bits = 4, .block = 128}, 128 + 1), 68 + 4 + 4);
  EXPECT_EQ(encoded_bytes({.bits = 8, .block = 128, .hadamard = true}, 128 + 33), 132 + 4 + 64);
  EXPECT_EQ(encoded_bytes({}, 0), 0);
}

TEST(RoundedBlocks, KeepIntegersOfTheScale) {
  for (const int bits : {8, 4}) {
    const int levels = bits == 8 ? 127 : 7;
    std::vector<float> values;
    for (int i = -levels; i <= levels; ++i) values.push_back(static_cast<float>(i) * 0.25f);
    EXPECT_EQ(sent({.bits = bits, .block = 256}, values), values);
  }
}

TEST(RoundedBlocks, RoundHalvesToEven) {
  EXPECT_EQ(sent({}, {127, 0.5, 1.5, -0.5, -2.5, 2.4999f}), (std::vector<float>{127, 0, 2, 0, -2, 2}));
}

TEST(RoundedBlocks, ZerosStay) { EXPECT_EQ(sent({.bits = 4, .hadamard = true}, std::vector<float>(40)), std::vector<float>(40)); }

TEST(RoundedBlocks, WhatIsNotFiniteMakesItsBlockNaN) {
  for (const float bad : {std::nanf(""), std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity()}) {
    for (const bool hadamard : {false, true}) {
      std::vector<float> values(64, 1);
      values[40] = bad;
      const auto arrived = sent({.block = 32, .hadamard = hadamard}, values);
      for (std::size_t i = 0; i < values.size(); ++i) EXPECT_EQ(std::isnan(arrived[i]), i >= 32) << i;
    }
  }
}

TEST(RoundedBlocks, TheSmallestAndLargestNumbersStayFinite) {
  const float smallest = std::numeric_limits<float>::denorm_min();
  for (const float largest : {smallest, 100 * smallest, 190 * smallest, std::numeric_limits<float>::max()}) {
    for (const int bits : {8, 4}) {
      for (const float value : sent({.bits = bits}, {largest, -largest, 0, largest})) {
        EXPECT_TRUE(std::abs(value) <= 1.5f * largest) << value << " of " << largest;
      }
    }
  }
}

// A single large value takes the digits of all others, unless it is spread.
TEST(RoundedBlocks, TheTransformSpreadsLargeValues) {
  std::vector<float> values(128, 0.01f);
  values[5] = 1;
  const auto error = [&](bool hadamard) {
    float all = 0;
    const auto arrived = sent({.bits = 4, .hadamard = hadamard}, values);
    for (std::size_t i = 0; i < values.size(); ++i) all += (arrived[i] - values[i]) * (arrived[i] - values[i]);
    return all;
  };
  EXPECT_LT(error(true), error(false) / 2);
}

TEST(RoundedBlocks, RoundingAtRandomHasTheExactMean) {
  const GradCommFormat format{.bits = 4, .block = 32, .stochastic_rounding = true};
  const std::vector<float> values = {7, 0.25f, -0.25f, 3.9f};
  std::vector<double> sums(values.size());
  constexpr int kTimes = 20'000;
  for (int i = 0; i < kTimes; ++i) {
    const auto arrived = sent(format, values, scrambled(static_cast<std::uint64_t>(i)));
    EXPECT_EQ(arrived, sent(format, values, scrambled(static_cast<std::uint64_t>(i))));
    for (std::size_t k = 0; k < values.size(); ++k) sums[k] += static_cast<double>(arrived[k]);
  }
  for (std::size_t k = 0; k < values.size(); ++k) EXPECT_NEAR(sums[k] / kTimes, static_cast<double>(values[k]), 0.02) << k;
}

TEST(RoundedBlocks, WhatIsLostComesLater) {
  for (const bool hadamard : {false, true}) {
    const GradCommFormat format{.bits = 4, .block = 32, .hadamard = hadamard, .error_feedback = true};
    std::vector<float> lost(20), sums(20);
    constexpr int kTimes = 200;
    for (int time = 0; time < kTimes; ++time) {
      std::vector<float> values(32);
      for (std::size_t i = 0; i < 20; ++i) values[i] = i == 0 ? 1.0f : 0.01f * static_cast<float>(i);
      std::vector<std::uint8_t> encoded(static_cast<std::size_t>(encoded_bytes(format, 20)));
      encode_blocks(format, values.data(), 20, 0, 0, lost.data(), encoded.data());
      decode_blocks(format, encoded.data(), 20, values.data());
      for (std::size_t i = 0; i < 20; ++i) sums[i] += values[i];
    }
    for (std::size_t i = 1; i < 20; ++i) EXPECT_NEAR(sums[i] / kTimes, 0.01 * static_cast<double>(i), 0.002) << i;
  }
}

TEST(RoundedBlocks, EachSettingChangesTheHash) {
  const std::vector<GradCommFormat> formats = {
      {}, {.bits = 4}, {.block = 64}, {.hadamard = true}, {.stochastic_rounding = true}, {.seed = 1}, {.error_feedback = true}};
  std::set<std::uint64_t> hashes;
  for (const auto& format : formats) hashes.insert(hash_of(format));
  EXPECT_EQ(hashes.size(), formats.size());
}

TEST(RoundedBlocks, FormatsThatDoNotExist) {
  const auto error = [](const GradCommFormat& format) { return testing::message_of([&] { check_format(format); }); };
  EXPECT_TRUE(testing::has(error({.bits = 2}), "2 bits; gradients are sent in 8 or 4"));
  EXPECT_TRUE(testing::has(error({.block = 48}), "a block of 48 elements; give a positive multiple of 32"));
  EXPECT_TRUE(testing::has(error({.block = 0}), "a block of 0 elements"));
  EXPECT_TRUE(testing::has(error({.block = 96, .hadamard = true}), "a power of two elements, not of 96"));
  EXPECT_EQ(error({.bits = 4, .block = 96}), "no error");
}

}  // namespace rounded_blocks_test
}  // namespace fsdp
