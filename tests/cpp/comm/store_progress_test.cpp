#include "comm/collectives/store_progress.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "events/event_ring.h"
#include "support/collective_checks.h"
#include "support/hosts.h"
#include "support/meshes.h"
#include "support/messages.h"
#include "support/multi_rank.h"

namespace fsdp::comm {
namespace store_progress_test {

using events::EventKind;
using std::chrono::milliseconds;
using testing::has;

constexpr milliseconds kInterval{50};
const std::string kRow = "dp_shard 0-3";

/// A store that counts what it is asked for, and can go.
class CountingStore : public c10d::HashStore {
 public:
  bool hasExtendedApi() const override { return can_append; }
  std::int64_t add(const std::string& key, std::int64_t value) override {
    ++questions;
    if (gone) throw std::runtime_error("the store has gone");
    return c10d::HashStore::add(key, value);
  }
  bool can_append = true;
  std::atomic<int> questions{0};
  std::atomic<bool> gone{false};
};

void record(std::uint32_t source, EventKind kind, std::uint64_t number) {
  events::record({.number = number, .source = source, .unit = events::name_of("blocks.5"), .kind = kind});
}

// In a process of their own, as they start its thread.
TEST(StoreProgress, WhoWaitsForNothingAnswers) {
  testing::run_ranks(1, [](int) {
    const auto store = c10::make_intrusive<CountingStore>();
    const auto row = events::new_source(kRow);
    const auto asker = std::make_shared<StoreProgress>(store, 3, kInterval);
    EXPECT_TRUE(asker->ask().empty()) << "nobody is there";
    const auto other = std::make_shared<StoreProgress>(store, 7, kInterval);
    record(row, EventKind::kPosted, 41);
    events::record({.source = row + 1, .unit = events::name_of("blocks.5"), .kind = EventKind::kEntered, .in_backward = true});
    std::atomic<bool> is_whole = true;
    other->answer(row, [&] { return is_whole.load(); });
    const auto answers = asker->ask();
    ASSERT_EQ(answers.size(), 1U);
    EXPECT_EQ(answers.at(7).activity, "in backward of 'blocks.5'");
    EXPECT_EQ(answers.at(7).last_numbers, (std::map<std::string, std::uint64_t>{{events::described_sources().at(row), 41}}));
    record(row, EventKind::kWaitBegan, 41);
    EXPECT_TRUE(asker->ask().empty()) << "it waits itself, and what it said before is old";
    record(row, EventKind::kWaitEnded, 41);
    EXPECT_EQ(asker->ask().size(), 1U);
    is_whole = false;
    EXPECT_TRUE(asker->ask().empty()) << "a rank of its row has gone, and the store perhaps with it";
    is_whole = true;
    EXPECT_EQ(asker->ask().size(), 1U);
    other->stop_answering(row);
    EXPECT_TRUE(asker->ask().empty());
    const int asked = store->questions;
    std::this_thread::sleep_for(4 * kInterval);
    EXPECT_EQ(store->questions, asked) << "who answers no more leaves the store alone";
  });
}

TEST(StoreProgress, WithoutAStoreThereAreNoAnswersAndNoErrors) {
  testing::run_ranks(1, [](int) {
    const auto store = c10::make_intrusive<CountingStore>();
    const auto row = events::new_source(kRow);
    const auto progress = std::make_shared<StoreProgress>(store, 0, kInterval);
    progress->answer(row, [] { return true; });
    std::this_thread::sleep_for(3 * kInterval);
    store->gone = true;
    std::this_thread::sleep_for(3 * kInterval);
    const int asked = store->questions;
    std::this_thread::sleep_for(4 * kInterval);
    EXPECT_EQ(store->questions, asked) << "it does not try again";
    EXPECT_TRUE(progress->ask().empty());
    const auto simple = c10::make_intrusive<CountingStore>();
    simple->can_append = false;
    EXPECT_TRUE(std::make_shared<StoreProgress>(simple, 0, kInterval)->ask().empty());
    EXPECT_EQ(simple->questions, 0);
  });
}

// A program may make a mesh for each of its models.
TEST(StoreProgress, RowsOfOneNameAreCountedApart) {
  const auto first = events::new_source(kRow);
  const auto second = events::new_source(kRow);
  record(first, EventKind::kPosted, 5);
  record(second, EventKind::kPosted, 2);
  const auto rows = events::described_sources();
  const auto progress = progress_of(events::RankReplay(events::recorded()), events::text_of, rows);
  EXPECT_EQ(progress.last_numbers.at(rows.at(first)), 5U);
  EXPECT_EQ(progress.last_numbers.at(rows.at(second)), 2U);
}

// Rank 3 sleeps. Rank 2, its neighbour, waits for it; ranks 0 and 1 are on another host, and wait for rank 2's host.
TEST(StoreProgress, ARankOfAnotherHostIsNamed) {
  if (!testing::can_pretend_hosts()) GTEST_SKIP() << "this system does not let a test pretend hosts";
  testing::run_ranks(4, [](int rank) {
    testing::pretend_hosts(rank, 2);
    setenv("FSDP_WAIT_NOTICE", "0.5", 1);
    const auto communicator = init_device_mesh("cpu", {{"dp_shard", -1}}).communicator("dp_shard");
    const at::Tensor full = at::empty({4});
    const GatherPart part{.full = full, .shard = full.narrow(0, rank, 1)};
    part.shard.fill_(1);
    communicator->all_gather({&part, 1}, testing::kGather)->wait();
    events::record(
        {.source = events::new_source("model"), .unit = events::name_of("blocks.5"), .kind = EventKind::kEntered, .in_backward = true});
    ::testing::internal::CaptureStderr();
    if (rank == 3) std::this_thread::sleep_for(milliseconds(2500));
    communicator->all_gather({&part, 1}, testing::kGather)->wait();
    communicator->barrier();
    const auto said = ::testing::internal::GetCapturedStderr();
    if (rank == 3) {
      EXPECT_EQ(said, "");
    } else {
      EXPECT_TRUE(has(said, "rank " + std::to_string(rank) + " has been waiting for rank 3 for ")) << said;
      EXPECT_TRUE(has(said, "rank 3 was last seen in backward of 'blocks.5'. With FSDP_EVENTS=FOLDER")) << said;
    }
  });
}

}  // namespace store_progress_test
}  // namespace fsdp::comm
