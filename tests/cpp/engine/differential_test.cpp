// Random models, unit divisions, options and training programs: sharded in two ways, against plain replicas in one process that sum in the
// same order, to the last bit. Every random choice of a case follows from its seed, which a failure prints:
//
//   FSDP_TEST_SEED=1234 FSDP_TEST_CASES=1 test_engine --gtest_filter='*Differential*'
//
// `make soak` goes on with fresh seeds.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdlib>
#include <vector>

#include "support/multi_rank.h"
#include "support/random_check.h"
#include "support/temporary_folder.h"

namespace differential_test {

#ifdef FSDP_SANITIZED
constexpr std::uint64_t kCases = 27;  // Each takes several times longer.
#else
constexpr std::uint64_t kCases = 80;
#endif

std::uint64_t from_environment(const char* name, std::uint64_t otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : std::strtoull(value, nullptr, 10);
}

class Differential : public ::testing::TestWithParam<int> {};

TEST_P(Differential, RandomModels) {
  const auto begin = from_environment("FSDP_TEST_SEED", 1);
  const auto count = from_environment("FSDP_TEST_CASES", kCases);
  std::vector<std::uint64_t> seeds;
  for (auto seed = begin; seed < begin + count; ++seed) {
    if (fsdp::testing::ranks_of(seed) == GetParam()) seeds.push_back(seed);
  }
  if (seeds.empty()) GTEST_SKIP() << "no case with this number of ranks";
  const fsdp::testing::TemporaryFolder folder;
  const auto body = [&] {
    fsdp::testing::Meshes meshes({.timeout = std::chrono::seconds(30)});
    for (const auto seed : seeds) fsdp::testing::check_seed(seed, meshes, folder.path());
  };
  fsdp::testing::run_ranks(GetParam(), body, std::chrono::minutes(5));
}

INSTANTIATE_TEST_SUITE_P(Ranks, Differential, ::testing::Values(1, 2, 3, 4, 5),
                         [](const auto& info) { return std::to_string(info.param); });

}  // namespace differential_test
