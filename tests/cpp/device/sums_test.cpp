#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <array>
#include <string>
#include <vector>

#include "comm/collectives/native_communicator.h"
#include "comm/device_sums.h"
#include "comm/rank_order_sum.h"
#include "streams.h"
#include "support/collective_checks.h"
#include "support/device_row.h"
#include "support/on_device.h"

// Sums by a kernel of ours, which this device runs as a GPU's threads would.
namespace sums_test {

using fsdp::comm::device_sums;
using fsdp::comm::DeviceSum;
using fsdp::comm::NativeCommunicator;
using fsdp::comm::RankOrderSum;
using fsdp::comm::ReducePart;
using fsdp::comm::SumEnd;
using fsdp::testing::expect_report;
using fsdp::testing::expected_sum;
using fsdp::testing::numbers;
using fsdp::testing::OfAllRanks;
using fsdp::testing::order;
using fsdp::testing::run_ranks_on_device;
using fsdp::testing::same_bits;
using fsdp::testing::side_stream;
using fsdp::testing::WithoutKernel;

using Kernels = std::map<std::string, std::int64_t>;

constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf};

enum class Place { kRows, kOwnApart, kScattered };

/// The same numbers on the device: in rows, but for one of them; none of which is where packs begin, if it is shifted.
std::vector<at::Tensor> on_device(const std::vector<at::Tensor>& sources, Place place, std::int64_t shift) {
  const auto numel = sources[0].numel();
  const auto stride = numel + shift;
  const auto count = static_cast<std::int64_t>(sources.size());
  const auto memory = at::zeros({count * (count + 1) * stride + shift}, sources[0].options().device(sim::device()));
  std::vector<at::Tensor> moved;
  for (std::int64_t k = 0; k < count; ++k) {
    std::int64_t slot = k;
    if (place == Place::kOwnApart) slot = k == count / 2 ? count : k - static_cast<std::int64_t>(k > count / 2);
    if (place == Place::kScattered) slot = k * (k + 1) / 2;
    moved.push_back(memory.narrow(0, shift + slot * stride, numel));
    moved.back().copy_(sources[static_cast<std::size_t>(k)]);
  }
  return moved;
}

class DeviceSums : public ::testing::TestWithParam<std::tuple<at::ScalarType, at::ScalarType>> {};

TEST_P(DeviceSums, HaveTheBitsOfTheHost) {
  const auto [source_dtype, out_dtype] = GetParam();
  for (const std::int64_t numel : {0, 1, 7, 64, 77}) {
    for (int ranks = 1; ranks <= 9; ++ranks) {
      std::vector<at::Tensor> sources;
      for (int r = 0; r < ranks; ++r) sources.push_back(numbers(numel, 31 + r, source_dtype));
      for (const bool accumulate : {false, true}) {
        const auto rounded = std::array{at::ScalarType::Undefined, at::kBFloat16, at::kHalf}[static_cast<std::size_t>(ranks % 3)];
        const SumEnd end{.scale = 1.0 / 3, .rounded = rounded, .accumulate = accumulate};
        const auto old = numbers(numel, 5, out_dtype);
        const auto expected = expected_sum(sources, old, end);
        for (const auto place : {Place::kRows, Place::kOwnApart}) {
          for (const std::int64_t shift : {0, 1, 4}) {
            const RankOrderSum sum{.sources = on_device(sources, place, shift),
                                   .out = old.to(sim::device()),
                                   .end = end,
                                   .apart = place == Place::kOwnApart ? ranks / 2 : RankOrderSum::kNone};
            const auto what = std::to_string(numel) + " elements, " + std::to_string(ranks) + " ranks, accumulate " +
                              std::to_string(accumulate) + ", shift " + std::to_string(shift);
            sim::reset_stats();
            fsdp::comm::rank_order_sums({&sum, 1});
            EXPECT_EQ(sim::stats().kernels, numel > 0 ? (Kernels{{"fsdp::sum", 1}}) : Kernels{}) << what;
            EXPECT_TRUE(same_bits(sum.out.cpu(), expected)) << what;
          }
        }
      }
    }
  }
}

TEST_P(DeviceSums, OfOperatorsHaveTheSameBits) {
  const auto [source_dtype, out_dtype] = GetParam();
  std::vector<at::Tensor> sources;
  for (int r = 0; r < 5; ++r) sources.push_back(numbers(77, 31 + r, source_dtype));
  const auto old = numbers(77, 5, out_dtype);
  for (const std::size_t ranks : {1, 2, 4, 5}) {
    const std::vector<at::Tensor> some(sources.begin(), sources.begin() + static_cast<std::ptrdiff_t>(ranks));
    const SumEnd end{.scale = 0.3, .rounded = at::kBFloat16, .accumulate = ranks % 2 == 0};
    const auto expected = expected_sum(some, old, end);
    // Nobody says that one lies apart. Two of them always have a distance.
    for (const auto place : {Place::kOwnApart, Place::kScattered}) {
      const RankOrderSum sum{.sources = on_device(some, place, 0), .out = old.to(sim::device()), .end = end};
      sim::reset_stats();
      fsdp::comm::rank_order_sums({&sum, 1});
      EXPECT_EQ(sim::stats().kernels.count("fsdp::sum"), ranks < 3 ? 1U : 0U) << ranks;
      EXPECT_TRUE(same_bits(sum.out.cpu(), expected)) << ranks;
    }
    const WithoutKernel by_operators(device_sums());
    const RankOrderSum sum{.sources = on_device(some, Place::kRows, 0), .out = old.to(sim::device()), .end = end};
    sim::reset_stats();
    fsdp::comm::rank_order_sums({&sum, 1});
    EXPECT_EQ(sim::stats().kernels.count("fsdp::sum"), 0U);
    EXPECT_TRUE(same_bits(sum.out.cpu(), expected)) << ranks;
  }
}

INSTANTIATE_TEST_SUITE_P(AllDtypes, DeviceSums, ::testing::Combine(::testing::ValuesIn(kDtypes), ::testing::ValuesIn(kDtypes)),
                         [](const auto& info) {
                           return std::string(c10::toString(std::get<0>(info.param))) + "To" + c10::toString(std::get<1>(info.param));
                         });

TEST(DeviceSum, MayEndInASource) {
  for (const int ranks : {1, 2, 5}) {
    std::vector<at::Tensor> sources;
    for (int r = 0; r < ranks; ++r) sources.push_back(numbers(77, r, at::kFloat));
    for (int own = 0; own < ranks; ++own) {
      const auto expected = expected_sum(sources, sources[0], {.scale = 0.5});
      const auto moved = on_device(sources, Place::kRows, 0);
      const RankOrderSum sum{.sources = moved, .out = moved[static_cast<std::size_t>(own)], .end = {.scale = 0.5}};
      fsdp::comm::rank_order_sums({&sum, 1});
      EXPECT_TRUE(same_bits(sum.out.cpu(), expected)) << ranks << " ranks, own " << own;
    }
  }
}

// More than the arguments of a kernel have room for.
TEST(DeviceSum, OfManyPartsIsFewKernels) {
  const auto options = at::TensorOptions().device(sim::device());
  std::vector<RankOrderSum> sums;
  for (int k = 0; k < 2 * DeviceSum::kMostParts + 1; ++k) {
    sums.push_back(
        {.sources = {at::full({3}, static_cast<double>(k), options), at::ones({3}, options)}, .out = at::empty({3}, options), .end = {}});
  }
  sim::reset_stats();
  fsdp::comm::rank_order_sums(sums);
  EXPECT_EQ(sim::stats().kernels, (Kernels{{"fsdp::sum", 3}}));
  for (std::size_t k = 0; k < sums.size(); ++k) EXPECT_EQ(sums[k].out.sum().item<float>(), 3.0F * static_cast<float>(k + 1)) << k;
}

// Only what ends alike is one kernel.
TEST(DeviceSum, OfDifferentEndsIsAKernelEach) {
  const auto options = at::TensorOptions().device(sim::device());
  const auto ones = at::ones({5}, options);
  const std::vector<RankOrderSum> sums = {
      {.sources = {ones, ones}, .out = at::ones({5}, options), .end = {.scale = 2}},
      {.sources = {ones, ones}, .out = at::ones({5}, options), .end = {.scale = 3}},
      {.sources = {ones, ones}, .out = at::ones({5}, options), .end = {.scale = 3, .accumulate = true}},
      {.sources = {ones, ones}, .out = at::ones({5}, options.dtype(at::kDouble)), .end = {.scale = 3}},
      {.sources = {ones, ones}, .out = at::ones({5}, options), .end = {.scale = 257.0 / 2, .rounded = at::kBFloat16}},
      {.sources = {ones, ones}, .out = at::ones({5}, options), .end = {.scale = 257.0 / 2}},
  };
  sim::reset_stats();
  fsdp::comm::rank_order_sums(sums);
  EXPECT_EQ(sim::stats().kernels, (Kernels{{"fsdp::sum", 6}}));
  const std::vector<float> expected = {4, 6, 7, 6, 256, 257};
  for (std::size_t k = 0; k < sums.size(); ++k) EXPECT_EQ(sums[k].out[4].item<float>(), expected[k]) << k;
}

// Far more than are read at once.
TEST(DeviceSum, OfManyRanksHasTheBitsOfTheHost) {
  for (const int ranks : {16, 17, 31, 100, 1027}) {
    std::vector<at::Tensor> sources;
    for (int r = 0; r < ranks; ++r) sources.push_back(numbers(9, 31 + r, at::kFloat));
    const auto expected = expected_sum(sources, sources[0], {});
    const RankOrderSum sum{.sources = on_device(sources, Place::kOwnApart, 0), .out = at::empty({9}, sim::device()), .apart = ranks / 2};
    sim::reset_stats();
    fsdp::comm::rank_order_sums({&sum, 1});
    EXPECT_EQ(sim::stats().kernels, (Kernels{{"fsdp::sum", 1}})) << ranks;
    EXPECT_TRUE(same_bits(sum.out.cpu(), expected)) << ranks;
  }
}

TEST(DeviceSum, KeepsTheSignOfZeros) {
  const auto zeros = at::full({5}, -0.F, sim::device());
  for (const std::size_t ranks : {1, 2, 3, 8, 11}) {
    const RankOrderSum sum{.sources = std::vector<at::Tensor>(ranks, zeros), .out = at::ones({5}, zeros.options()), .end = {}};
    fsdp::comm::rank_order_sums({&sum, 1});
    EXPECT_TRUE(same_bits(sum.out.cpu(), zeros.cpu())) << ranks;
  }
}

TEST(DeviceSum, OfRowsByOperatorsIsAKernelForEachLevel) {
  const WithoutKernel by_operators(device_sums());
  const auto rows = at::ones({8, 20}, at::TensorOptions().device(sim::device()).dtype(at::kBFloat16));
  const RankOrderSum sum{.sources = rows.unbind(0), .out = at::empty({20}, rows.options().dtype(at::kFloat)), .end = {}};
  sim::reset_stats();
  fsdp::comm::rank_order_sums({&sum, 1});
  EXPECT_EQ(sim::stats().kernels, (Kernels{{"aten::sum", 3}}));
  EXPECT_EQ(sum.out.sum().item<float>(), 160);
}

TEST(DeviceSum, ThatNobodyOrderedIsReported) {
  const auto options = at::TensorOptions().device(sim::device());
  const auto rows = at::ones({3, 20}, options);
  const auto out = at::ones({20}, options);
  const auto side = side_stream();
  order(fsdp::testing::current_stream(), side);
  const auto sum = [&](const at::Tensor& to, bool accumulate) {
    const c10::StreamGuard on_side(side);
    const RankOrderSum sum{.sources = {rows[0], rows[1], rows[2]}, .out = to, .end = {.accumulate = accumulate}};
    fsdp::comm::rank_order_sums({&sum, 1});
  };
  sum(out, false);
  sim::expect_no_reports();
  order(side, fsdp::testing::current_stream());
  rows[1].fill_(2);
  sum(out, false);
  expect_report("read after write: 'fsdp::sum'");
  order(fsdp::testing::current_stream(), side);
  sum(out, true);
  sim::expect_no_reports();
  out.clone();
  expect_report("read after write");
  out.fill_(1);
  sim::take_reports();
  sum(out, false);
  expect_report("write after write: 'fsdp::sum'");
  order(side, fsdp::testing::current_stream());
}

// All parts of a unit, in bf16.
TEST(DeviceSum, OfAReduceScatterIsOneKernel) {
  constexpr int kRanks = 3;
  const fsdp::testing::TemporaryFolder folder;
  run_ranks_on_device(kRanks, [&](int rank) {
    OfAllRanks all(folder, rank, kRanks);
    NativeCommunicator communicator(all.row, all.backend, all.rendezvous.gloo_group(all.row, "control"));
    const auto options = at::TensorOptions().device(sim::device(rank)).dtype(at::kBFloat16);
    std::vector<ReducePart> parts;
    for (const std::int64_t numel : {200, 0, 7}) {
      parts.push_back({.unreduced = at::full({kRanks * numel}, rank + 1, options),
                       .staging = at::empty({communicator.staging_numel(numel, at::kBFloat16)}, options),
                       .out = at::zeros({numel}, options.dtype(at::kFloat))});
    }
    sim::reset_stats(rank);
    communicator.reduce_scatter(parts, 0.5, {.operation = "reduce-scatter", .unit = "u"})->wait();
    auto kernels = sim::stats(rank).kernels;
    std::erase_if(kernels, [](const auto& kernel) { return kernel.first.starts_with("simccl"); });
    EXPECT_EQ(kernels, (Kernels{{"fsdp::sum", 1}}));
    for (const auto& part : parts) EXPECT_TRUE(at::equal(part.out.cpu(), at::full({part.out.numel()}, 3.F)));
  });
}

// Hosts of three ranks: the sums of each level, of all parts, are one kernel.
TEST(DeviceSum, OfTwoLevelsIsTwoKernels) {
  constexpr int kRanks = 6;
  constexpr int kPerHost = 3;
  const fsdp::testing::TemporaryFolder folder;
  run_ranks_on_device(kRanks, [&](int rank) {
    OfAllRanks all(folder, rank, kRanks);
    NativeCommunicator communicator(all.row, all.backend, all.rendezvous.gloo_group(all.row, "control"), kPerHost);
    const auto reduced = [&] {
      std::vector<ReducePart> parts;
      for (const std::int64_t numel : {200, 7}) {
        const auto unreduced = numbers(kRanks * numel, 10 * numel + rank, at::kBFloat16).to(sim::device(rank));
        const auto staging = at::empty({communicator.staging_numel(numel, at::kBFloat16)}, unreduced.options());
        const auto out = at::ones({numel}, unreduced.options().dtype(at::kFloat));
        parts.push_back({.unreduced = unreduced, .staging = staging, .out = out, .accumulate = true, .rounded = true});
      }
      sim::reset_stats(rank);
      communicator.reduce_scatter(parts, 1.0 / kRanks, {.operation = "reduce-scatter", .unit = "u"})->wait();
      return parts;
    };
    const auto by_kernels = reduced();
    auto kernels = sim::stats(rank).kernels;
    std::erase_if(kernels, [](const auto& kernel) { return kernel.first.starts_with("simccl"); });
    EXPECT_EQ(kernels, (Kernels{{"fsdp::sum", 2}}));
    const WithoutKernel without(device_sums());
    const auto by_operators = reduced();
    for (std::size_t k = 0; k < by_kernels.size(); ++k) EXPECT_TRUE(same_bits(by_kernels[k].out.cpu(), by_operators[k].out.cpu())) << k;
  });
}

// On hosts of three ranks, in two levels, and on one host.
TEST(DeviceSum, OfPiecesHasTheBitsOfTheWhole) {
  constexpr int kRanks = 6;
  constexpr std::int64_t kPieceStaging = 1000;
  for (const int per_host : {3, 6}) {
    const fsdp::testing::TemporaryFolder folder;
    run_ranks_on_device(kRanks, [&](int rank) {
      OfAllRanks all(folder, rank, kRanks);
      const auto reduced = [&](const std::string& name, std::int64_t piece_staging) {
        NativeCommunicator communicator(all.row, all.backend, all.rendezvous.gloo_group(all.row, name), per_host,
                                        fsdp::comm::Group::Ends::kElsewhere, piece_staging);
        std::vector<ReducePart> parts;
        for (const std::int64_t numel : {2000, 7, 305}) {
          const auto unreduced = numbers(kRanks * numel, 10 * numel + rank, at::kBFloat16).to(sim::device(rank));
          const auto staging = at::empty({communicator.staging_numel(numel, at::kBFloat16)}, unreduced.options());
          const auto out = at::ones({numel}, unreduced.options().dtype(at::kFloat));
          parts.push_back({.unreduced = unreduced, .staging = staging, .out = out, .accumulate = true});
        }
        const auto pending = communicator.reduce_scatter(parts, 1.0 / kRanks, {.operation = "reduce-scatter", .unit = "u"});
        const auto busy = parts[0].unreduced * 2;  // Beside it, as a backward computes.
        pending->wait();
        for (auto& part : parts) part.staging.fill_(7);  // The next reduction's, in the order of the computing stream.
        for (auto& part : parts) part.unreduced.fill_(7);
        return parts;
      };
      const auto in_pieces = reduced("pieces", kPieceStaging);
      EXPECT_LE(in_pieces[0].staging.numel(), 2 * kPieceStaging);
      const auto whole = reduced("whole", fsdp::comm::SumLevels::kPieceStaging);
      EXPECT_GT(whole[0].staging.numel(), 2 * kPieceStaging);
      for (std::size_t k = 0; k < whole.size(); ++k) EXPECT_TRUE(same_bits(in_pieces[k].out.cpu(), whole[k].out.cpu())) << k;
    });
  }
}

}  // namespace sums_test
