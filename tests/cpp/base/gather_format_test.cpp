// Eight bits per element, or differences in four, block by block: the scale, its limits, and what no number can say.

#include "fsdp/gather_format.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <limits>

#include "base/block_format.h"
#include "fsdp/error.h"
#include "support/exact_arithmetic.h"
#include "support/same_bits.h"

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
  for (const std::int64_t block : {0, -16, 8, 33}) {
    EXPECT_THROW(fsdp::float8_blocks(block), fsdp::Error) << block;
    EXPECT_THROW(fsdp::int4_differences({.block = block}), fsdp::Error) << block;
  }
  for (const std::int64_t block : {8, 48, 512}) EXPECT_THROW(fsdp::int4_differences({block, /*hadamard=*/true}), fsdp::Error) << block;
}

/// What is left in `whole` (2-D) when this difference to it has arrived.
at::Tensor with_difference(const at::Tensor& whole, const at::Tensor& difference, const fsdp::Int4Differences& options) {
  const auto format = fsdp::int4_differences(options);
  const auto wire = at::zeros({whole.size(0), whole.size(1) / options.block * format.block_bytes}, at::kByte);
  format.pre_all_gather(difference, wire);
  auto after = whole.clone();
  format.post_all_gather(wire, after);
  return after;
}

TEST(Int4Differences, ArriveAsDocumented) {
  torch::manual_seed(3);
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const std::int64_t block : {16, 128, 256}) {
      for (const bool hadamard : {false, true}) {
        const auto whole = at::randn({3, 2 * block}).to(dtype);
        // Blocks of all magnitudes, one of zeros, and one of the least numbers.
        const auto main =
            whole.to(at::kFloat) + at::randn({3, 2 * block}) * at::logspace(-9, 2, 6).view({3, 2}).repeat_interleave(block, 1);
        main.select(0, 1).slice(0, 0, block).copy_(whole.select(0, 1).slice(0, 0, block));
        auto least = whole.clone();
        least.select(0, 2).slice(0, 0, block).zero_();
        main.select(0, 2).slice(0, 0, block).copy_(at::arange(block) * std::numeric_limits<float>::denorm_min());
        fsdp::testing::Int4Receiver receiver(least, dtype, block, hadamard);
        receiver.receive(main);
        const auto after = with_difference(least, main - least.to(at::kFloat), {block, hadamard});
        EXPECT_TRUE(fsdp::testing::same_bits(after, receiver.values())) << block << hadamard;
      }
    }
  }
}

TEST(Int4Differences, TheLargestOfABlockArrivesAlmostExactly) {
  for (const bool hadamard : {false, true}) {
    const auto difference = at::zeros({1, 128});
    difference[0][5] = 1;
    const auto after = with_difference(at::zeros({1, 128}), difference, {.hadamard = hadamard});
    EXPECT_NEAR(after[0][5].item<float>(), 1, 1.0 / 128);
    EXPECT_EQ(after.count_nonzero().item<std::int64_t>(), 1);
  }
}

TEST(Int4Differences, WhatIsNotFiniteMakesItsBlockNaN) {
  for (const float value : {INFINITY, -INFINITY, NAN}) {
    for (const bool hadamard : {false, true}) {
      const auto difference = at::zeros({1, 64});
      difference[0][3] = value;
      const auto after = with_difference(at::ones({1, 64}), difference, {32, hadamard});
      EXPECT_TRUE(after.slice(1, 0, 32).isnan().all().item<bool>()) << value;
      EXPECT_TRUE(after.slice(1, 32).eq(1).all().item<bool>()) << value;
    }
  }
}

}  // namespace gather_format_test
