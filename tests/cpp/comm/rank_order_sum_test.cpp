#include "comm/rank_order_sum.h"

#include <string>

#include "fsdp/error.h"
#include "support/collective_checks.h"
#include "support/multi_rank.h"

namespace fsdp::comm {
namespace rank_order_sum_test {

using testing::expected_sum;
using testing::numbers;
using testing::same_bits;

constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf};

// Around the chunk size, and lengths that leave a vector loop's tail.
constexpr std::int64_t kLengths[] = {0, 1, 7, 2048, 2049, 4111};

class RankOrderSum : public ::testing::TestWithParam<std::tuple<at::ScalarType, at::ScalarType>> {};

TEST_P(RankOrderSum, IsBitExact) {
  const auto [source_dtype, out_dtype] = GetParam();
  for (const std::int64_t numel : kLengths) {
    for (const int ranks : {1, 2, 3, 4, 7, 8}) {
      std::vector<at::Tensor> sources;
      for (int r = 0; r < ranks; ++r) sources.push_back(numbers(numel, 31 + r, source_dtype));
      for (const bool accumulate : {false, true}) {
        for (const auto rounded : {at::ScalarType::Undefined, at::kBFloat16, at::kHalf}) {
          const at::Tensor old = numbers(numel, 5, out_dtype);
          const SumEnd end{.scale = 1.0 / 3, .rounded = rounded, .accumulate = accumulate};
          const at::Tensor expected = expected_sum(sources, old, end);
          const auto what = std::to_string(numel) + " elements, " + std::to_string(ranks) + " ranks, accumulate " +
                            std::to_string(accumulate) + ", rounded to " + c10::toString(rounded);
          const at::Tensor out = old.clone();
          rank_order_sum(sources, out, end);
          EXPECT_TRUE(same_bits(out, expected)) << what;
          const at::Tensor in_rows = at::cat(sources);
          std::vector<at::Tensor> rows;
          for (int r = 0; r < ranks; ++r) rows.push_back(in_rows.narrow(0, r * numel, numel));
          for (const auto& of_ranks : {sources, rows}) {
            const comm::RankOrderSum sum{.sources = of_ranks, .out = old.clone(), .end = end};
            sum_by_operators({&sum, 1});
            EXPECT_TRUE(same_bits(sum.out, expected)) << "operators: " << what;
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(AllDtypes, RankOrderSum, ::testing::Combine(::testing::ValuesIn(kDtypes), ::testing::ValuesIn(kDtypes)),
                         [](const auto& info) {
                           return std::string(c10::toString(std::get<0>(info.param))) + "To" + c10::toString(std::get<1>(info.param));
                         });

TEST(RankOrderSum, ThreadsGiveTheSameBits) {
  testing::run_ranks(1, [] {
    constexpr std::int64_t kNumel = 1'000'003;
    for (const int ranks : {1, 2, 5}) {
      std::vector<at::Tensor> sources;
      for (int r = 0; r < ranks; ++r) sources.push_back(numbers(kNumel, 31 + r, at::kBFloat16));
      const at::Tensor old = numbers(kNumel, 5, at::kFloat);
      const at::Tensor expected = expected_sum(sources, old, {.scale = 0.3, .accumulate = true});
      at::set_num_threads(3);
      const at::Tensor out = old.clone();
      rank_order_sum(sources, out, {.scale = 0.3, .accumulate = true});
      at::set_num_threads(1);
      EXPECT_TRUE(same_bits(out, expected)) << ranks << " ranks";
    }
  });
}

TEST(RankOrderSum, SumsPairwiseInRankOrder) {
  const auto sum = [](const std::vector<float>& values) {
    std::vector<at::Tensor> sources;
    for (const float value : values) sources.push_back(torch::tensor({value}));
    const at::Tensor out = torch::zeros({1});
    rank_order_sum(sources, out, {});
    return out.item<float>();
  };
  EXPECT_EQ(sum({1e8f, -1e8f, 1.f}), 1.f);  // (0 + 1) + 2
  EXPECT_EQ(sum({1.f, 1e8f, -1e8f}), 0.f);
  EXPECT_EQ(sum({1.f, 1e8f, 1.f, -1e8f}), 0.f);       // (0 + 1) + (2 + 3)
  EXPECT_EQ(sum({1e8f, 0.f, -1e8f, 1.f, 0.f}), 0.f);  // ((0 + 1) + (2 + 3)) + 4
  EXPECT_EQ(sum({1e8f, 1.f, -1e8f, 1.f}), 0.f);
  EXPECT_EQ(sum({1e8f, -1e8f, 1.f, 2.f}), 3.f);
  EXPECT_EQ(sum({1e8f, -1e8f, 3.f, 4.f, 1.f}), 8.f);
}

TEST(RankOrderSum, IsTheSumOverRowsOfSumsWithinThem) {
  std::vector<at::Tensor> sources;
  for (int r = 0; r < 8; ++r) sources.push_back(numbers(100, 7 + r, at::kFloat));
  const at::Tensor all = torch::zeros({100});
  rank_order_sum(sources, all, {});
  for (const std::size_t row : {2, 4}) {
    std::vector<at::Tensor> rows;
    for (std::size_t begin = 0; begin < 8; begin += row) {
      rows.push_back(torch::zeros({100}));
      rank_order_sum(std::span(sources).subspan(begin, row), rows.back(), {});
    }
    const at::Tensor of_rows = torch::zeros({100});
    rank_order_sum(rows, of_rows, {});
    EXPECT_TRUE(same_bits(of_rows, all)) << row;
  }
}

TEST(RankOrderSum, SumsHalfPrecisionInFp32) {
  // 257 has no bfloat16, so that a sum in bfloat16 would stay at 256.
  std::vector<at::Tensor> sources = {torch::full({3000}, 256, at::kBFloat16)};
  for (int i = 0; i < 3; ++i) sources.push_back(torch::ones({3000}, at::kBFloat16));
  const at::Tensor out = torch::zeros({3000});
  rank_order_sum(sources, out, {});
  EXPECT_TRUE(at::equal(out, torch::full({3000}, 259.f)));
}

TEST(RankOrderSum, OutMayBeASource) {
  for (const int ranks : {1, 2, 5}) {
    std::vector<at::Tensor> sources;
    for (int r = 0; r < ranks; ++r) sources.push_back(numbers(5000, r, at::kFloat));
    for (int own = 0; own < ranks; ++own) {
      auto aliased = sources;
      const at::Tensor out = sources[static_cast<std::size_t>(own)].clone();
      aliased[static_cast<std::size_t>(own)] = out;
      const at::Tensor expected = expected_sum(sources, out.clone(), {.scale = 0.5});
      rank_order_sum(aliased, out, {.scale = 0.5});
      EXPECT_TRUE(same_bits(out, expected)) << ranks << " ranks, own " << own;
    }
  }
}

TEST(RankOrderSum, KeepsInfinitiesAndNans) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<at::Tensor> sources = {torch::tensor({kInfinity, kNan, -0.f, 3.4e38f}), torch::tensor({1.f, 1.f, -0.f, 3.4e38f})};
  const at::Tensor out = torch::zeros({4}, at::kBFloat16);
  rank_order_sum(sources, out, {});
  EXPECT_EQ(out[0].item<float>(), kInfinity);
  EXPECT_TRUE(std::isnan(out[1].item<float>()));
  EXPECT_TRUE(std::signbit(out[2].item<float>()));
  EXPECT_EQ(out[3].item<float>(), kInfinity);
}

TEST(RankOrderSum, RefusesOtherDtypes) {
  const std::vector<at::Tensor> sources = {torch::zeros({4}, at::kLong)};
  EXPECT_THROW(rank_order_sum(sources, torch::zeros({4}), {}), Error);
}

}  // namespace rank_order_sum_test
}  // namespace fsdp::comm
