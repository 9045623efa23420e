#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <map>
#include <string>

#include "base/block_format.h"
#include "fsdp/gather_format.h"
#include "streams.h"
#include "support/collective_checks.h"
#include "support/on_device.h"

// Gathers in eight bits, whose conversions are kernels of ours.
namespace formats_test {

using fsdp::testing::numbers;
using fsdp::testing::order;
using fsdp::testing::same_bits;
using fsdp::testing::side_stream;
using fsdp::testing::WithoutKernel;

using Kernels = std::map<std::string, std::int64_t>;

/// What travels, and what arrives, of these pieces.
struct Travelled {
  Travelled(const at::Tensor& main, std::int64_t block, at::ScalarType compute) {
    const auto format = fsdp::float8_blocks(block);
    const auto pieces = main.size(0);
    const auto bytes = main.size(1) / block * format.block_bytes;
    wire = at::zeros({pieces, bytes}, main.options().dtype(at::kByte));
    // Behind one element, where no pack begins.
    whole = at::zeros({main.numel() + 1}, main.options().dtype(compute)).narrow(0, 1, main.numel()).view(main.sizes());
    sim::reset_stats();
    format.pre_all_gather(main, wire);
    format.post_all_gather(wire, whole);
    kernels = sim::stats().kernels;
  }

  at::Tensor wire;
  at::Tensor whole;
  Kernels kernels;
};

/// Of all magnitudes, and blocks of zeros, of powers of two and of the least numbers.
at::Tensor values(std::int64_t pieces, std::int64_t block, at::ScalarType dtype) {
  auto all = numbers(pieces * 6 * block, 3, at::kDouble).view({pieces, 6 * block});
  all.narrow(1, 0, block).zero_();
  all.narrow(1, block, block).fill_(std::ldexp(448.0, 3));
  all.narrow(1, 2 * block, block).mul_(std::ldexp(1.0, -126));
  all.narrow(1, 3 * block, block).fill_(std::numeric_limits<float>::denorm_min());
  return all.to(dtype);
}

class DeviceFormats : public ::testing::TestWithParam<at::ScalarType> {};

TEST_P(DeviceFormats, HaveTheBytesOfTheHost) {
  for (const std::int64_t block : {16, 32, 48}) {
    for (const std::int64_t pieces : {1, 3}) {
      const auto main = values(pieces, block, GetParam());
      for (const auto compute : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
        const Travelled host(main, block, compute);
        const auto there = main.to(sim::device());
        const Travelled device(there, block, compute);
        EXPECT_EQ(device.kernels, (Kernels{{"fsdp::decode", 1}, {"fsdp::encode", 1}}));
        EXPECT_TRUE(at::equal(device.wire.cpu(), host.wire)) << block;
        EXPECT_TRUE(same_bits(device.whole.cpu(), host.whole)) << block;
        const WithoutKernel encode(fsdp::device_encoders()), decode(fsdp::device_decoders());
        const Travelled operators(there, block, compute);
        EXPECT_EQ(operators.kernels.count("fsdp::encode"), 0U);
        EXPECT_TRUE(at::equal(operators.wire.cpu(), host.wire)) << block;
        EXPECT_TRUE(same_bits(operators.whole.cpu(), host.whole)) << block;
      }
    }
  }
}

TEST_P(DeviceFormats, AddDifferencesAsTheHost) {
  for (const std::int64_t block : {16, 64}) {
    for (const bool hadamard : {false, true}) {
      const auto format = fsdp::int4_differences({block, hadamard});
      const auto difference = values(3, block, at::kFloat);
      difference[1][0] = INFINITY;
      const auto whole = numbers(difference.numel(), 4, at::kDouble).view(difference.sizes()).to(GetParam());
      const auto add = [&](const c10::Device& device) {
        const auto wire = at::zeros({3, 6 * format.block_bytes}, at::TensorOptions(at::kByte).device(device));
        const auto after = whole.to(device, GetParam(), /*non_blocking=*/false, /*copy=*/true);
        format.pre_all_gather(difference.to(device), wire);
        format.post_all_gather(wire, after);
        return std::pair(wire.cpu(), after.cpu());
      };
      const auto [host_wire, host] = add(at::kCPU);
      const auto [device_wire, device] = add(sim::device());
      EXPECT_TRUE(at::equal(device_wire, host_wire)) << block << hadamard;
      EXPECT_TRUE(at::allclose(device, host, /*rtol=*/0, /*atol=*/0, /*equal_nan=*/true)) << block << hadamard;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(AllDtypes, DeviceFormats, ::testing::Values(at::kFloat, at::kDouble, at::kBFloat16, at::kHalf),
                         [](const auto& info) { return std::string(c10::toString(info.param)); });

TEST(DeviceFormat, WhatIsNotFiniteArrivesAsNaN) {
  const auto main = at::ones({1, 64});
  main[0][3] = INFINITY;
  main[0][40] = -NAN;
  const Travelled device(main.to(sim::device()), 32, at::kFloat);
  const auto whole = device.whole.cpu();
  EXPECT_TRUE(std::isnan(whole[0][3].item<float>()));
  EXPECT_TRUE(std::isnan(whole[0][40].item<float>()));
}

TEST(DeviceFormat, ConversionsThatNobodyOrderedAreReported) {
  const auto main = at::ones({1, 64}, sim::device());
  const auto side = side_stream();
  {
    const c10::StreamGuard on_side(side);
    const Travelled device(main, 32, at::kFloat);
  }
  const auto reports = sim::take_reports();
  ASSERT_EQ(reports.size(), 1U);
  EXPECT_NE(reports[0].find("read after write: 'fsdp::encode'"), std::string::npos) << reports[0];
  order(side, fsdp::testing::current_stream());
}

}  // namespace formats_test
