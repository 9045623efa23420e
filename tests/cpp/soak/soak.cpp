// Random training runs (random_case.h) with fresh seeds, for as long as SECONDS says; SEED=n repeats one of them.

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <torch/torch.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "support/multi_rank.h"
#include "support/random_check.h"
#include "support/temporary_folder.h"

namespace soak {

using Clock = std::chrono::steady_clock;

/// So long one case may take, on a busy machine; what takes longer hangs.
constexpr unsigned kWatchdogSeconds = 120 * fsdp::testing::kSlowdown;
/// The ranks of so many seeds are started together.
constexpr std::uint64_t kBatch = 32;

/// In memory that the ranks share with the process that started them.
struct Progress {
  std::atomic<std::uint64_t> running;  ///< The seed of the case at hand; 0: none.
  std::atomic<std::uint64_t> done;
  std::atomic<std::size_t> failed;
  std::array<std::atomic<std::uint64_t>, 1024> failed_seeds;

  void add_failed(std::uint64_t seed) {
    for (std::size_t i = 0; i < std::min(failed.load(), failed_seeds.size()); ++i) {
      if (failed_seeds[i] == seed) return;
    }
    if (const auto i = failed.fetch_add(1); i < failed_seeds.size()) failed_seeds[i] = seed;
  }
};

Progress& shared_progress() {
  void* memory = mmap(nullptr, sizeof(Progress), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("mmap");
  return *new (memory) Progress{};
}

std::uint64_t from_environment(const char* name, std::uint64_t otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr || *value == '\0' ? otherwise : std::strtoull(value, nullptr, 10);
}

void run(int ranks, const std::vector<std::uint64_t>& seeds, Clock::time_point end, Progress& progress) {
  const fsdp::testing::TemporaryFolder folder;
  progress.running = 0;
  const auto body = [&](int rank) {
    fsdp::testing::Meshes meshes({.timeout = std::chrono::seconds(60)});
    for (const auto seed : seeds) {
      // All ranks must stop at the same case.
      const bool late = Clock::now() >= end;
      if (meshes.in_rows(1).sum(late ? 1 : 0) > 0) break;
      alarm(kWatchdogSeconds);
      if (rank == 0) {
        progress.running = seed;
        std::printf("SEED=%llu on %d\n", static_cast<unsigned long long>(seed), ranks);
        std::fflush(stdout);
      }
      const int failed_before = fsdp::testing::failed_parts();
      fsdp::testing::check_seed(seed, meshes, folder.path());
      if (fsdp::testing::failed_parts() != failed_before) progress.add_failed(seed);
      if (rank == 0) ++progress.done;
    }
    if (rank == 0) progress.running = 0;
  };
  fsdp::testing::run_ranks(ranks, body, std::chrono::seconds(kWatchdogSeconds));
  if (const auto seed = progress.running.load(); seed != 0) progress.add_failed(seed);
}

TEST(Soak, RandomModels) {
  auto& progress = shared_progress();
  const auto seconds = from_environment("SECONDS", 60);
  const auto one = from_environment("SEED", 0);
  const auto cases = from_environment("CASES", one == 0 ? ~std::uint64_t{0} : 1);
  const auto end = Clock::now() + std::chrono::seconds(one == 0 ? seconds : 1000000);
  const std::uint64_t begin = one != 0 ? one : std::random_device()();
  for (std::uint64_t seed = begin; seed - begin < cases && Clock::now() < end; seed += kBatch) {
    std::map<int, std::vector<std::uint64_t>> by_ranks;
    for (auto s = seed; s < seed + kBatch && s - begin < cases; ++s) by_ranks[fsdp::testing::ranks_of(s)].push_back(s);
    for (const auto& [ranks, seeds] : by_ranks) run(ranks, seeds, end, progress);
  }
  std::printf("%llu cases ended, %zu failed\n", static_cast<unsigned long long>(progress.done), progress.failed.load());
  for (std::size_t i = 0; i < std::min(progress.failed.load(), progress.failed_seeds.size()); ++i) {
    std::printf("failed: make soak SEED=%llu\n", static_cast<unsigned long long>(progress.failed_seeds[i]));
  }
}

}  // namespace soak
