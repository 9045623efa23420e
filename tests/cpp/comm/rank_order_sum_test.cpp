#include "comm/rank_order_sum.h"

#include <string>

#include "collective_checks.h"
#include "fsdp/error.h"

namespace fsdp::comm {
namespace {

using testing::expected_sum;
using testing::numbers;
using testing::same_bytes;

constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf};

// Around the chunk size, and lengths that leave a vector loop's tail.
constexpr std::int64_t kLengths[] = {0, 1, 7, 2048, 2049, 4111};

class RankOrderSum : public ::testing::TestWithParam<std::tuple<at::ScalarType, at::ScalarType>> {};

TEST_P(RankOrderSum, IsBitExact) {
  const auto [source_dtype, out_dtype] = GetParam();
  for (const std::int64_t numel : kLengths) {
    for (const int ranks : {1, 2, 3, 4, 7}) {
      std::vector<at::Tensor> sources;
      for (int r = 0; r < ranks; ++r) sources.push_back(numbers(numel, 31 + r, source_dtype));
      for (const bool accumulate : {false, true}) {
        const at::Tensor old = numbers(numel, 5, out_dtype);
        const double scale = 1.0 / 3;
        const at::Tensor expected = expected_sum(sources, old, scale, accumulate);
        const at::Tensor out = old.clone();
        rank_order_sum(sources, out, scale, accumulate);
        EXPECT_TRUE(same_bytes(out, expected)) << numel << " elements, " << ranks << " ranks, accumulate " << accumulate;
        const at::Tensor by_operators = old.clone();
        rank_order_sum_by_operators(sources, by_operators, scale, accumulate);
        EXPECT_TRUE(same_bytes(by_operators, expected))
            << "operators: " << numel << " elements, " << ranks << " ranks, accumulate " << accumulate;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(AllDtypes, RankOrderSum, ::testing::Combine(::testing::ValuesIn(kDtypes), ::testing::ValuesIn(kDtypes)),
                         [](const auto& info) {
                           return std::string(c10::toString(std::get<0>(info.param))) + "To" + c10::toString(std::get<1>(info.param));
                         });

TEST(RankOrderSum, SumsFromLeftToRight) {
  const std::vector<at::Tensor> sources = {torch::tensor({1e8f}), torch::tensor({-1e8f}), torch::tensor({1.f})};
  const at::Tensor out = torch::zeros({1});
  rank_order_sum(sources, out, 1, false);
  EXPECT_EQ(out.item<float>(), 1.f);
  const std::vector<at::Tensor> other_order = {sources[2], sources[0], sources[1]};
  rank_order_sum(other_order, out, 1, false);
  EXPECT_EQ(out.item<float>(), 0.f);
}

TEST(RankOrderSum, SumsHalfPrecisionInFp32) {
  // 257 has no bfloat16, so that a sum in bfloat16 would stay at 256.
  std::vector<at::Tensor> sources = {torch::full({3000}, 256, at::kBFloat16)};
  for (int i = 0; i < 3; ++i) sources.push_back(torch::ones({3000}, at::kBFloat16));
  const at::Tensor out = torch::zeros({3000});
  rank_order_sum(sources, out, 1, false);
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
      const at::Tensor expected = expected_sum(sources, out.clone(), 0.5, false);
      rank_order_sum(aliased, out, 0.5, false);
      EXPECT_TRUE(same_bytes(out, expected)) << ranks << " ranks, own " << own;
    }
  }
}

TEST(RankOrderSum, KeepsInfinitiesAndNans) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<at::Tensor> sources = {torch::tensor({kInfinity, kNan, -0.f, 3.4e38f}), torch::tensor({1.f, 1.f, -0.f, 3.4e38f})};
  const at::Tensor out = torch::zeros({4}, at::kBFloat16);
  rank_order_sum(sources, out, 1, false);
  EXPECT_EQ(out[0].item<float>(), kInfinity);
  EXPECT_TRUE(std::isnan(out[1].item<float>()));
  EXPECT_TRUE(std::signbit(out[2].item<float>()));
  EXPECT_EQ(out[3].item<float>(), kInfinity);
}

TEST(RankOrderSum, RefusesOtherDtypes) {
  const std::vector<at::Tensor> sources = {torch::zeros({4}, at::kLong)};
  EXPECT_THROW(rank_order_sum(sources, torch::zeros({4}), 1, false), Error);
}

}  // namespace
}  // namespace fsdp::comm
