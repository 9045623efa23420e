#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/rounded_arithmetic.h"
#include "base/rounded_blocks.h"
#include "base/rounded_rows.h"
#include "comm/collectives/native_communicator.h"
#include "streams.h"
#include "support/collective_checks.h"
#include "support/device_row.h"
#include "support/on_device.h"

// Gradients in 8 or 4 bits, whose conversions are kernels of ours.
namespace rounding_test {

using fsdp::GradCommFormat;
using fsdp::RoundedRows;
using fsdp::comm::Encoding;
using fsdp::comm::NativeCommunicator;
using fsdp::comm::ReducePart;
using fsdp::comm::SumLevels;
using fsdp::testing::numbers;
using fsdp::testing::OfAllRanks;
using fsdp::testing::order;
using fsdp::testing::run_ranks_on_device;
using fsdp::testing::same_bits;
using fsdp::testing::side_stream;
using fsdp::testing::WithoutKernel;

using Kernels = std::map<std::string, std::int64_t>;

const std::vector<GradCommFormat> kFormats = {
    {.bits = 8, .block = 32},
    {.bits = 4, .block = 96, .error_feedback = true},
    {.bits = 8, .block = 64, .hadamard = true},
    {.bits = 4, .block = 512, .hadamard = true, .stochastic_rounding = true, .error_feedback = true},
    {.bits = 8, .block = 32, .stochastic_rounding = true, .error_feedback = true},
};

/// Rows of which the second one is this sender's own, with the same numbers on every device.
struct Rows {
  static constexpr std::int64_t kNumbers = 4, kOwn = 1;

  Rows(const GradCommFormat& format, std::int64_t numel, const c10::Device& device) {
    const auto padded = fsdp::padded_numel(format, numel);
    auto values = numbers(kNumbers * padded, 3, at::kFloat).view({kNumbers, padded});
    values[0].zero_();
    values[2].mul_(std::ldexp(1.0, -140));
    values[3][numel / 2] = std::numeric_limits<float>::infinity();
    rows = {.values = values.to(device),
            .encoded = at::zeros({kNumbers - 1, fsdp::encoded_bytes(format, numel)}, at::TensorOptions(at::kByte).device(device)),
            .numel = numel,
            .own = kOwn,
            .first = 5,
            .key = 0xfedcba9876543210ULL,
            .reduction_number = at::full({}, 3, at::TensorOptions(at::kLong).device(device))};
    if (format.error_feedback) rows.lost = numbers((kNumbers - 1) * (numel + 7), 4, at::kFloat).to(device).view({kNumbers - 1, -1});
    if (format.error_feedback) rows.lost = rows.lost.narrow(1, 3, numel);
    fsdp::encode_rows(format, {&rows, 1});
    encoded = rows.encoded.cpu();
    fsdp::decode_rows(format, {&rows, 1});
  }

  /// What other ranks see, and what is kept. `zeros`: whether the sign of zeros counts.
  void expect_equal(const Rows& other, bool zeros) const {
    EXPECT_TRUE(at::equal(encoded, other.encoded));
    for (const auto& [a, b] : {std::pair(rows.values.cpu().narrow(1, 0, rows.numel), other.rows.values.cpu().narrow(1, 0, rows.numel)),
                               std::pair(rows.lost.defined() ? rows.lost.cpu() : at::zeros({1}),
                                         other.rows.lost.defined() ? other.rows.lost.cpu() : at::zeros({1}))}) {
      EXPECT_TRUE(at::equal(a.isnan(), b.isnan()));
      EXPECT_TRUE(zeros ? same_bits(a.nan_to_num(), b.nan_to_num()) : at::equal(a.nan_to_num(), b.nan_to_num()));
    }
  }

  RoundedRows rows;
  at::Tensor encoded;
};

TEST(DeviceRounding, HasTheBytesOfTheHost) {
  for (const auto& format : kFormats) {
    for (const std::int64_t numel : {1, 64, 700, 1536}) {
      SCOPED_TRACE(fsdp::describe(format) + ", " + std::to_string(numel) + " elements");
      const Rows host(format, numel, at::kCPU);
      sim::reset_stats();
      const Rows kernel(format, numel, sim::device());
      EXPECT_EQ(sim::stats().kernels.at("fsdp::round"), 1);
      EXPECT_EQ(sim::stats().kernels.at("fsdp::unround"), 1);
      kernel.expect_equal(host, /*zeros=*/true);
      const WithoutKernel round(fsdp::device_rounders()), unround(fsdp::device_unrounders());
      sim::reset_stats();
      const Rows operators(format, numel, sim::device());
      EXPECT_EQ(sim::stats().kernels.count("fsdp::round"), 0U);
      operators.expect_equal(host, /*zeros=*/false);
    }
  }
}

TEST(DeviceRounding, OfManyPartsTakesSeveralKernels) {
  const GradCommFormat format{.bits = 8, .block = 32};
  std::vector<RoundedRows> all;
  for (int k = 0; k < fsdp::DeviceRounding::kMostParts + 1; ++k) {
    all.push_back({.values = at::full({2, 8}, k + 1.0, sim::device()),
                   .encoded = at::zeros({1, fsdp::encoded_bytes(format, 8)}, at::TensorOptions(at::kByte).device(sim::device())),
                   .numel = 8});
  }
  sim::reset_stats();
  fsdp::encode_rows(format, all);
  fsdp::decode_rows(format, all);
  EXPECT_EQ(sim::stats().kernels, (Kernels{{"fsdp::round", 2}, {"fsdp::unround", 2}}));
  for (std::size_t k = 0; k < all.size(); ++k) EXPECT_EQ(all[k].values[1][7].item<float>(), static_cast<float>(k + 1)) << k;
}

TEST(DeviceRounding, ThatNobodyOrderedIsReported) {
  const GradCommFormat format{.bits = 8, .block = 32};
  const auto side = side_stream();
  const RoundedRows rows{.values = at::ones({2, 32}, sim::device()),
                         .encoded = at::zeros({1, 36}, at::TensorOptions(at::kByte).device(sim::device())),
                         .numel = 32};
  {
    const c10::StreamGuard on_side(side);
    fsdp::encode_rows(format, {&rows, 1});
  }
  const auto reports = sim::take_reports();
  ASSERT_FALSE(reports.empty());
  EXPECT_NE(reports[0].find("'fsdp::round'"), std::string::npos) << reports[0];
  order(side, fsdp::testing::current_stream());
}

/// Two reductions, of which the second one adds what the first one has lost. The results, and what is lost.
std::vector<at::Tensor> reduced(NativeCommunicator& communicator, const c10::Device& device, const GradCommFormat& format) {
  std::vector<at::Tensor> lost, outs;
  const std::vector<std::pair<std::int64_t, at::ScalarType>> shapes = {
      {2000, at::kBFloat16}, {7, at::kHalf}, {0, at::kFloat}, {305, at::kFloat}};
  for (const auto& [numel, dtype] : shapes) {
    lost.push_back(at::zeros({communicator.traffic().contributions() * numel}, device));
    outs.push_back(at::ones({numel}, device));
  }
  for (std::uint64_t step = 1; step <= 2; ++step) {
    const auto number =
        device.is_cpu() ? at::Tensor() : at::full({}, static_cast<std::int64_t>(step), at::TensorOptions(at::kLong).device(device));
    std::vector<ReducePart> parts;
    for (std::size_t k = 0; k < shapes.size(); ++k) {
      const auto [numel, dtype] = shapes[k];
      const auto seed = static_cast<std::int64_t>(100 * k + 10 * step) + communicator.rank();
      const auto bytes = communicator.traffic().staging_bytes(numel, format, dtype);
      parts.push_back({.unreduced = numbers(communicator.size() * numel, seed, dtype).to(device),
                       .staging = at::empty({bytes}, at::TensorOptions(at::kByte).device(device)),
                       .out = outs[k],
                       .accumulate = true,
                       .rounded = true,
                       .encoding = Encoding{
                           .format = format, .key = k, .reduction_number = step, .reduction_number_on_device = number, .lost = lost[k]}});
    }
    const auto pending = communicator.reduce_scatter(parts, 0.3, {.operation = "reduce-scatter", .unit = "u"});
    const auto busy = parts[0].unreduced * 2;  // Beside it, as a backward computes.
    pending->wait();
    for (auto& part : parts) part.staging.fill_(7);  // The next reduction's, in the order of the computing stream.
    for (auto& part : parts) part.unreduced.fill_(7);
  }
  std::vector<at::Tensor> all;
  for (const auto& tensors : {outs, lost}) {
    for (const auto& tensor : tensors) all.push_back(tensor.cpu());
  }
  return all;
}

// On hosts of two ranks, in two levels; on hosts of one rank, and on one host. Whole and in pieces, by kernels and by operators.
TEST(DeviceRounding, OfAReduceScatterHasTheBitsOfTheHost) {
  constexpr int kRanks = 4;
  constexpr std::int64_t kPieceStaging = 2000;
  const GradCommFormat format{.bits = 4, .block = 32, .hadamard = true, .stochastic_rounding = true, .error_feedback = true};
  for (const int per_host : {1, 2, kRanks}) {
    const fsdp::testing::TemporaryFolder folder;
    run_ranks_on_device(kRanks, [&](int rank) {
      OfAllRanks all(folder, rank, kRanks);
      const auto with = [&](const std::string& name, const c10::intrusive_ptr<c10d::Backend>& backend, std::int64_t piece_staging) {
        return std::make_unique<NativeCommunicator>(all.row, backend, all.rendezvous.gloo_group(all.row, name), per_host,
                                                    fsdp::comm::Group::Ends::kElsewhere, piece_staging);
      };
      const auto host = with("host", all.rendezvous.gloo_group(all.row, "gloo"), SumLevels::kPieceStaging);
      const auto whole = with("whole", all.backend, SumLevels::kPieceStaging);
      const auto pieces = with("pieces", all.backend, kPieceStaging);
      EXPECT_LE(pieces->traffic().staging_bytes(2000, format, at::kBFloat16), 4 * kPieceStaging);
      EXPECT_GT(whole->traffic().staging_bytes(2000, format, at::kBFloat16), 4 * kPieceStaging);
      const auto expected = reduced(*host, at::kCPU, format);
      const auto check = [&](NativeCommunicator& communicator, const std::string& what) {
        const auto results = reduced(communicator, sim::device(rank), format);
        for (std::size_t k = 0; k < results.size(); ++k) EXPECT_TRUE(at::equal(results[k], expected[k])) << what << ", " << k;
      };
      sim::reset_stats(rank);
      check(*whole, "whole");
      auto kernels = sim::stats(rank).kernels;
      EXPECT_EQ(kernels["fsdp::round"], 2) << "of all parts, in each reduction";
      EXPECT_EQ(kernels["fsdp::unround"], 2);
      check(*pieces, "in pieces");
      const WithoutKernel round(fsdp::device_rounders()), unround(fsdp::device_unrounders());
      check(*pieces, "by operators");
    });
  }
}

}  // namespace rounding_test
