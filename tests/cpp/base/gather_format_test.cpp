// Eight bits per element, block by block: the scale, its limits, and what no number can say.

#include "fsdp/gather_format.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <limits>

#include "base/block_format.h"
#include "fsdp/error.h"

namespace gather_format_test {

constexpr std::int64_t kBlock = 32;
constexpr float kLargest = 448;  // of float8_e4m3fn

/// One block that holds `value` and a quarter of it, as it travels and arrives.
struct Travelled {
  explicit Travelled(float value) {
    const auto format = fsdp::float8_blocks(kBlock);
    auto main = at::zeros({1, kBlock});
    main[0][3] = value;
    main[0][4] = value / 4;
    const auto wire = at::zeros({1, format.block_bytes}, at::kByte);
    format.pre_all_gather(main, wire);
    format.post_all_gather(wire, whole);
    scale_byte = wire[0][kBlock].item<int>();
  }
  float at(std::int64_t index) const { return whole[0][index].item<float>(); }

  at::Tensor whole = at::zeros({1, kBlock});
  int scale_byte = 0;  // its value is 2^(scale_byte - 127)
};

TEST(GatherFormat, ScalesByTheSmallestPowerOfTwoThatFits) {
  for (const int power : {-20, -1, 0, 1, 30}) {
    const float largest = std::ldexp(kLargest, power);
    EXPECT_EQ(Travelled(largest).scale_byte, 127 + power);
    EXPECT_EQ(Travelled(largest).at(3), largest);
    EXPECT_EQ(Travelled(largest).at(4), largest / 4);
    EXPECT_EQ(Travelled(std::nextafter(largest, INFINITY)).scale_byte, 128 + power);
    EXPECT_EQ(Travelled(-largest).at(3), -largest);
  }
}

TEST(GatherFormat, SmallAndLargeNumbersStayFinite) {
  EXPECT_EQ(Travelled(std::ldexp(1.5F, 127)).at(3), std::ldexp(1.5F, 127));
  EXPECT_TRUE(std::isfinite(Travelled(std::numeric_limits<float>::denorm_min()).at(3)));
  EXPECT_EQ(Travelled(0).at(3), 0);
}

TEST(GatherFormat, WhatIsNotFiniteArrivesAsNaN) {
  for (const float value : {INFINITY, -INFINITY, NAN}) EXPECT_TRUE(std::isnan(Travelled(value).at(3))) << value;
}

TEST(GatherFormat, BlocksAreConvertedApart) {
  const auto format = fsdp::float8_blocks(kBlock);
  auto main = at::full({2, 2 * kBlock}, 0.5);
  main[0][0] = 1e6;
  main[1][0] = NAN;
  const auto wire = at::zeros({2, 2 * format.block_bytes}, at::kByte);
  const auto whole = at::zeros_like(main);
  format.pre_all_gather(main, wire);
  format.post_all_gather(wire, whole);
  EXPECT_TRUE(whole.narrow(1, kBlock, kBlock).eq(0.5).all().item<bool>());
}

// Every code, and numbers of all exponents up to those that are rounded to the largest one.
TEST(GatherFormat, ConvertsAsTorchDoes) {
  for (int code = 0; code < 256; ++code) {
    const auto byte = static_cast<std::uint8_t>(code);
    const float torchs = c10::Float8_e4m3fn(byte, c10::Float8_e4m3fn::from_bits());
    if (std::isnan(torchs)) {
      EXPECT_TRUE(std::isnan(fsdp::float8_value(byte))) << code;
    } else {
      EXPECT_EQ(fsdp::bits_of(fsdp::float8_value(byte)), fsdp::bits_of(torchs)) << code;
    }
  }
  for (std::uint32_t magnitude = 0; magnitude <= fsdp::bits_of(464.0f); magnitude += 997) {
    for (const float value : {fsdp::float_of(magnitude), -fsdp::float_of(magnitude)}) {
      ASSERT_EQ(fsdp::float8_code(value), c10::Float8_e4m3fn(value).x) << value;
    }
  }
}

TEST(GatherFormat, RefusesOtherBlocks) {
  for (const std::int64_t block : {0, -16, 8, 33}) EXPECT_THROW(fsdp::float8_blocks(block), fsdp::Error) << block;
}

}  // namespace gather_format_test
