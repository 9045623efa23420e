#include "memory/slot_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "memory/shared_heap.h"
#include "support/logging_device.h"

namespace fsdp::memory {
namespace slot_pool_test {

constexpr auto kKind = Kind::kGatheredParameters;

class SlotPoolTest : public ::testing::Test {
 protected:
  MemoryStats stats() const { return accounting.stats(); }
  Accounting accounting;
  SlotPool pool{c10::Device(c10::kCPU), accounting};
};

TEST_F(SlotPoolTest, AnEmptySlotHoldsNothing) {
  Slot slot;
  EXPECT_FALSE(slot);
  EXPECT_EQ(slot.data(), nullptr);
  slot.release();
  EXPECT_EQ(stats().slots.live, 0);
}

TEST_F(SlotPoolTest, LentBytesCountUnderTheirKind) {
  auto parameters = pool.acquire(128, Kind::kGatheredParameters);
  auto gradients = pool.acquire(64, Kind::kUnreducedGradients);
  EXPECT_TRUE(parameters);
  EXPECT_EQ(parameters.bytes(), 128);
  EXPECT_EQ(stats().gathered_parameters.live, 128);
  EXPECT_EQ(stats().unreduced_gradients.live, 64);
  EXPECT_EQ(stats().slots.live, 192);
  parameters.release();
  EXPECT_FALSE(parameters);
  EXPECT_EQ(stats().gathered_parameters.live, 0);
  EXPECT_EQ(stats().gathered_parameters.peak, 128);
  EXPECT_EQ(stats().slots.live, 192);  // the pool keeps the block
  EXPECT_EQ(stats().unreduced_gradients.live, 64);
}

// The allocator would lend it anew to the stream that it was allocated on, which does not wait for the one that uses it.
TEST(SlotPoolOnADevice, BlocksAreRecordedWhereTheyWereUsedLast) {
  using testing::LoggingDevice;
  using Log = std::vector<std::string>;
  const LoggingDevice device;
  Accounting accounting;
  SlotPool pool(LoggingDevice::device(), accounting);
  pool.set_source([](std::int64_t) { return c10::DataPtr(nullptr, LoggingDevice::device()); });
  LoggingDevice::set_current_stream(1);
  pool.acquire(64, kKind).release();
  pool.acquire(128, kKind).release();  // Gives back the block of 64 bytes.
  EXPECT_EQ(LoggingDevice::take_events(), Log{});
  LoggingDevice::set_current_stream(2);
  pool.acquire(128, kKind).release();
  EXPECT_EQ(LoggingDevice::take_events(), Log{});
  pool.acquire(256, kKind).release();
  EXPECT_EQ(LoggingDevice::take_events(), Log{"memory on 2"});
  LoggingDevice::set_current_stream(3);
  { const auto lent = pool.acquire(256, kKind); }
  pool.set_source({});
  EXPECT_EQ(LoggingDevice::take_events(), Log{"memory on 3"});
}

TEST_F(SlotPoolTest, TakesBlocksFromItsSource) {
  int live = 0;
  int given = 0;
  const auto source = [&](std::int64_t bytes) -> c10::DataPtr {
    ++live;
    ++given;
    struct Block {
      std::vector<char> memory;
      int* live;
    };
    auto* block = new Block{std::vector<char>(static_cast<std::size_t>(bytes)), &live};
    const auto free = [](void* context) {
      auto* freed = static_cast<Block*>(context);
      --*freed->live;
      delete freed;
    };
    return {block->memory.data(), block, free, c10::Device(c10::kCPU)};
  };
  auto before = pool.acquire(128, kKind);
  pool.acquire(64, kKind).release();
  EXPECT_EQ(stats().slots.live, 192);
  pool.set_source(source);
  EXPECT_EQ(stats().slots.live, 128);  // what was free has gone
  auto first = pool.acquire(32, kKind);
  EXPECT_EQ(given, 1);
  before.release();
  EXPECT_EQ(stats().slots.live, 32);  // what was lent has gone, too
  first.release();
  auto again = pool.acquire(32, kKind);
  EXPECT_EQ(given, 1);
  pool.set_source({});
  EXPECT_EQ(live, 1);
  again.release();
  EXPECT_EQ(live, 0);
  auto own = pool.acquire(32, kKind);
  EXPECT_EQ(given, 1);
  EXPECT_EQ(stats().slots.live, 32);
}

// Steps that follow a plan, before and after.
TEST_F(SlotPoolTest, ASourceServesPlansToo) {
  const auto step = [&] {
    auto a = pool.acquire(100, kKind);
    auto b = pool.acquire(50, kKind);
    a.release();
    auto c = pool.acquire(60, kKind);
    b.release();
    c.release();
    pool.end_step();
  };
  for (int i = 0; i < 4; ++i) step();
  int given = 0;
  pool.set_source([&](std::int64_t bytes) {
    ++given;
    return c10::GetAllocator(c10::kCPU)->allocate(static_cast<std::size_t>(bytes));
  });
  EXPECT_EQ(stats().slots.live, 0);
  for (int i = 0; i < 4; ++i) step();
  const int steady = given;
  EXPECT_GE(steady, 2);
  step();
  EXPECT_EQ(given, steady);
}

TEST_F(SlotPoolTest, BlocksThatPeersMayReadAreShown) {
  constexpr std::int64_t kLarge = std::int64_t{64} << 10;
  {
    SlotPool own(c10::Device(c10::kCPU), accounting);
    auto before = own.acquire(kLarge, kKind);
    const auto heap = SharedHeap::open();
    auto small = own.acquire(100, kKind);
    auto large = own.acquire(3 * kLarge, kKind);
    EXPECT_EQ(stats().slots.live, 4 * kLarge + 100);
    EXPECT_EQ(stats().shared_slots.live, 3 * kLarge);
    before.release();
    large.release();
    auto larger = own.acquire(4 * kLarge, kKind);  // in place of the largest free block
    EXPECT_EQ(stats().shared_slots.live, 4 * kLarge);
    EXPECT_EQ(stats().shared_slots.peak, 4 * kLarge);
    accounting.reset_peaks();
  }
  EXPECT_EQ(stats().shared_slots.live, 0);
  EXPECT_EQ(stats().slots.live, 0);
  EXPECT_EQ(stats().shared_slots.peak, 4 * kLarge);
  accounting.reset_peaks();
  EXPECT_EQ(stats().shared_slots.peak, 0);
}

TEST_F(SlotPoolTest, BlocksHoldNaNOnDemand) {
  const auto is_nan = [](const void* block) {
    const auto* bytes = static_cast<const unsigned char*>(block);
    return std::all_of(bytes, bytes + 100, [](unsigned char byte) { return byte == 0xff; });
  };
  auto kept = pool.acquire(100, kKind);
  std::memset(kept.data(), 0, 100);
  fill_slots_with_nan(true);
  auto slot = pool.acquire(100, kKind);
  const auto* block = slot.data();
  EXPECT_TRUE(is_nan(block));
  std::memset(slot.data(), 0, 100);
  slot.release();
  EXPECT_TRUE(is_nan(block));  // the pool keeps the block
  EXPECT_FALSE(is_nan(kept.data()));
  fill_slots_with_nan(false);
  block = kept.data();
  kept.release();
  EXPECT_FALSE(is_nan(block));
}

TEST_F(SlotPoolTest, LiveSlotsNeverOverlap) {
  std::vector<Slot> slots;
  for (int i = 0; i < 8; ++i) slots.push_back(pool.acquire(100, kKind));
  for (int i = 0; i < 8; ++i) std::memset(slots[static_cast<std::size_t>(i)].data(), i, 100);
  for (int i = 0; i < 8; ++i) {
    const auto* bytes = static_cast<const char*>(slots[static_cast<std::size_t>(i)].data());
    EXPECT_EQ(std::count(bytes, bytes + 100, static_cast<char>(i)), 100) << i;
  }
}

TEST_F(SlotPoolTest, AReleasedBlockServesTheNextRequest) {
  auto slot = pool.acquire(256, kKind);
  const void* data = slot.data();
  slot.release();
  slot = pool.acquire(200, Kind::kCommunication);
  EXPECT_EQ(slot.data(), data);
  EXPECT_EQ(slot.bytes(), 200);
  EXPECT_EQ(stats().communication.live, 200);  // what was asked for, not the block
  EXPECT_EQ(stats().slots.live, 256);
  EXPECT_EQ(stats().slot_allocations, 1);
}

TEST_F(SlotPoolTest, TheSmallestBlockThatFitsIsTaken) {
  auto large = pool.acquire(300, kKind);
  auto middle = pool.acquire(200, kKind);
  auto small = pool.acquire(100, kKind);
  const void* middle_data = middle.data();
  large.release();
  middle.release();
  small.release();
  EXPECT_EQ(pool.acquire(150, kKind).data(), middle_data);
  EXPECT_EQ(pool.acquire(200, kKind).data(), middle_data);  // an exact fit is one
  EXPECT_EQ(stats().slot_allocations, 3);
}

TEST_F(SlotPoolTest, WhereNoneFitsTheLargestFreeBlockIsReplaced) {
  auto a = pool.acquire(100, kKind);
  auto b = pool.acquire(200, kKind);
  a.release();
  b.release();
  const auto c = pool.acquire(300, kKind);
  EXPECT_EQ(stats().slot_allocations, 3);
  EXPECT_EQ(stats().slots.live, 100 + 300);
  EXPECT_EQ(stats().slots.peak, 100 + 300);  // the old block goes before the new one comes
  // The 100-byte block is still there.
  EXPECT_EQ(pool.acquire(100, kKind).bytes(), 100);
  EXPECT_EQ(stats().slot_allocations, 3);
}

TEST_F(SlotPoolTest, ABlockInUseIsNeverReplaced) {
  auto a = pool.acquire(100, kKind);
  std::memset(a.data(), 1, 100);
  const auto b = pool.acquire(300, kKind);
  EXPECT_EQ(stats().slots.live, 400);
  EXPECT_EQ(static_cast<const char*>(a.data())[99], 1);
}

TEST_F(SlotPoolTest, MovingASlotMovesTheLease) {
  auto a = pool.acquire(100, kKind);
  const void* data = a.data();
  Slot b = std::move(a);
  EXPECT_FALSE(a);  // NOLINT(bugprone-use-after-move): what a moved-from slot is, is part of its contract
  EXPECT_EQ(b.data(), data);
  a.release();
  EXPECT_EQ(stats().gathered_parameters.live, 100);
  auto c = pool.acquire(50, Kind::kCommunication);
  c = std::move(b);  // gives its own block back first
  EXPECT_EQ(stats().communication.live, 0);
  EXPECT_EQ(c.data(), data);
  { const Slot gone = std::move(c); }
  EXPECT_EQ(stats().gathered_parameters.live, 0);
  EXPECT_EQ(stats().total.live, 0);
}

TEST_F(SlotPoolTest, ASlotWithoutBytesIsASlot) {
  auto empty = pool.acquire(0, kKind);
  EXPECT_TRUE(empty);
  EXPECT_EQ(empty.bytes(), 0);
  empty.release();
  const auto next = pool.acquire(10, kKind);
  EXPECT_EQ(stats().slots.live, 10);
}

TEST_F(SlotPoolTest, TheEndGivesEverythingBack) {
  {
    SlotPool other(c10::Device(c10::kCPU), accounting);
    auto a = other.acquire(100, kKind);
    const auto b = other.acquire(200, kKind);
    a.release();
    EXPECT_EQ(stats().slots.live, 300);
  }
  EXPECT_EQ(stats().slots.live, 0);
  EXPECT_EQ(stats().total.live, 0);
}

// A random program of requests, again and again: what the class promises for training steps.
TEST_F(SlotPoolTest, ARepeatedProgramStopsAllocating) {
  struct Step {
    bool acquires;
    std::size_t slot;
    std::int64_t bytes;
  };
  for (std::uint32_t seed = 0; seed < 50; ++seed) {
    std::mt19937 random(seed);
    std::vector<Step> program;
    std::map<std::size_t, std::int64_t> live;
    std::size_t most_live = 0;
    for (std::size_t i = 0; i < 60; ++i) {
      if (live.size() < 6 && (live.empty() || random() % 2 == 0)) {
        const auto bytes = static_cast<std::int64_t>(1 + random() % 1000);
        program.push_back({true, i, bytes});
        live[i] = bytes;
      } else {
        const auto chosen = std::next(live.begin(), static_cast<std::ptrdiff_t>(random() % live.size()));
        program.push_back({false, chosen->first, 0});
        live.erase(chosen);
      }
      most_live = std::max(most_live, live.size());
    }
    for (const auto& [slot, bytes] : live) program.push_back({false, slot, 0});

    Accounting own_accounting;
    SlotPool own_pool(c10::Device(c10::kCPU), own_accounting);
    std::int64_t allocations_before_last = 0;
    constexpr int kRounds = 12;
    for (int round = 0; round < kRounds; ++round) {
      if (round == kRounds - 4) allocations_before_last = own_accounting.stats().slot_allocations;
      std::map<std::size_t, Slot> slots;
      for (const auto& step : program) {
        if (step.acquires) {
          slots[step.slot] = own_pool.acquire(step.bytes, kKind);
        } else {
          slots.erase(step.slot);
        }
      }
    }
    const auto own_stats = own_accounting.stats();
    EXPECT_EQ(own_stats.slot_allocations, allocations_before_last) << "seed " << seed;
    // No more blocks than were ever live at once, none larger than the largest request.
    EXPECT_LE(own_stats.slots.live, static_cast<std::int64_t>(most_live) * 1000) << "seed " << seed;
    EXPECT_GE(own_stats.slots.live, own_stats.total.peak) << "seed " << seed;
    EXPECT_EQ(own_stats.total.live, 0) << "seed " << seed;
  }
}

/// A step in which the order of sizes misleads who does not know what comes: the small request takes the large block.
void misleading_step(SlotPool& pool) {
  auto large = pool.acquire(1000, kKind);
  large.release();
  const auto small = pool.acquire(10, kKind);
  const auto large_again = pool.acquire(1000, kKind);
}

TEST_F(SlotPoolTest, FollowsAPlanWhenStepsRepeat) {
  misleading_step(pool);
  EXPECT_EQ(stats().slots.live, 2000);
  pool.end_step();
  EXPECT_EQ(pool.planned_bytes(), 0);  // one step is no pattern
  misleading_step(pool);
  pool.end_step();
  EXPECT_EQ(pool.planned_bytes(), 1010);
  pool.end_step();  // nothing happened: no step
  for (int step = 0; step < 3; ++step) {
    misleading_step(pool);
    pool.end_step();
    EXPECT_EQ(stats().slots.live, 1010);
  }
  const auto allocations = stats().slot_allocations;
  misleading_step(pool);
  pool.end_step();
  EXPECT_EQ(stats().slot_allocations, allocations);
}

// Once it is known that no plan takes less memory, none is sought, until another step may have left more.
TEST(SlotPools, SeekAPlanAgainWhenTheirMemoryMayHaveGrown) {
  for (const int requests : {2, 1 << 17}) {  // of a step that is recorded, and of one that is too long
    Accounting accounting;
    SlotPool pool(c10::Device(c10::kCPU), accounting);
    const auto small_steps = [&] {
      for (int k = 0; k < 3; ++k) {
        pool.acquire(1000, kKind).release();
        pool.end_step();
      }
    };
    small_steps();
    EXPECT_EQ(pool.planned_bytes(), 0) << requests;
    {
      const auto kept = pool.acquire(1000, kKind);
      for (int k = 1; k < requests; ++k) pool.acquire(5000, kKind).release();
    }
    pool.end_step();
    small_steps();
    EXPECT_EQ(pool.planned_bytes(), 1000) << requests;
    EXPECT_EQ(accounting.stats().slots.live, 1000) << requests;
  }
}

// The allocator of a device can give it to others at once.
TEST(SlotPoolOnADevice, FreeBlocksDoNotStay) {
  Accounting accounting;
  SlotPool pool(c10::Device(c10::kCPU), accounting, SlotPool::Idle::kIsFreed);
  std::vector<std::int64_t> held;
  for (int step = 0; step < 4; ++step) {
    const auto note = [&] { held.push_back(accounting.stats().slots.live); };
    auto first = pool.acquire(1000, kKind);
    auto second = pool.acquire(300, kKind);
    first.release();
    note();
    first = pool.acquire(1000, kKind);
    first.release();
    note();
    second.release();
    note();
    pool.end_step();
  }
  ASSERT_EQ(held.size(), 12U);
  for (std::size_t k = 0; k < held.size(); k += 3) {
    EXPECT_EQ(held[k], 300);
    EXPECT_EQ(held[k + 1], 300);
    EXPECT_EQ(held[k + 2], 0);
  }
}

TEST_F(SlotPoolTest, WhatThePlanDidNotForeseeIsServed) {
  for (int step = 0; step < 3; ++step) {
    misleading_step(pool);
    pool.end_step();
  }
  {
    auto first = pool.acquire(1000, kKind);  // as planned
    std::memset(first.data(), 1, 1000);
    auto other = pool.acquire(500, kKind);
    std::memset(other.data(), 2, 500);
    auto third = pool.acquire(500, kKind);
    std::memset(third.data(), 3, 500);
    pool.end_step();  // not yet: slots are lent
    EXPECT_EQ(static_cast<const char*>(first.data())[999], 1);
    EXPECT_EQ(static_cast<const char*>(other.data())[499], 2);
    EXPECT_EQ(stats().total.live, 2000);
  }
  pool.end_step();
  EXPECT_EQ(pool.planned_bytes(), 1010);
  misleading_step(pool);
  pool.end_step();
  EXPECT_EQ(stats().slots.live, 1010);
  // A new pattern becomes the plan once it repeats and needs less than what it has led to.
  const auto other_step = [&] {
    misleading_step(pool);
    misleading_step(pool);
    const auto more = pool.acquire(2000, kKind);
  };
  for (int step = 0; step < 4; ++step) {
    other_step();
    pool.end_step();
  }
  const auto allocations = stats().slot_allocations;
  other_step();
  pool.end_step();
  EXPECT_EQ(stats().slot_allocations, allocations);
}

// In inference the root's slot is never given back, so no step ever ends.
TEST_F(SlotPoolTest, TheRecordOfAStepThatNeverEndsIsBounded) {
  auto root = pool.acquire(64, kKind);
  std::size_t longest = 0;
  for (int i = 0; i < 200'000; ++i) {
    auto slot = pool.acquire(128, kKind);
    slot.release();
    pool.end_step();
    longest = std::max(longest, pool.recorded());
  }
  EXPECT_LE(longest, std::size_t{1} << 16U);
  EXPECT_EQ(stats().slots.live, 192);
  // Once it does end, the next steps are recorded, and planned, as ever.
  root.release();
  pool.end_step();
  EXPECT_EQ(pool.recorded(), 0U);
  auto next = pool.acquire(128, kKind);
  EXPECT_EQ(pool.recorded(), 1U);
}

}  // namespace slot_pool_test
}  // namespace fsdp::memory
