#include "events/event_ring.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace event_ring_test {

using fsdp::events::Event;
using fsdp::events::EventKind;
using fsdp::events::EventRing;

/// An event whose fields all follow from its number, so that a mixed one is noticed.
Event numbered(std::uint64_t number) {
  return {.bytes = static_cast<std::int64_t>(3 * number),
          .number = number,
          .source = static_cast<std::uint32_t>(number % 7),
          .unit = static_cast<std::uint32_t>(number % 11),
          .operation = static_cast<std::uint32_t>(number % 13),
          .kind = EventKind::kPosted,
          .in_backward = number % 2 == 1};
}

void expect_whole(const Event& event) {
  const auto expected = numbered(event.number);
  EXPECT_EQ(event.bytes, expected.bytes);
  EXPECT_EQ(event.source, expected.source);
  EXPECT_EQ(event.unit, expected.unit);
  EXPECT_EQ(event.operation, expected.operation);
  EXPECT_EQ(event.in_backward, expected.in_backward);
  EXPECT_GT(event.time, 0);
}

TEST(EventRing, KeepsTheLastEventsInTheirOrder) {
  const auto ring = std::make_unique<EventRing>();
  EXPECT_TRUE(ring->read().empty());
  const std::uint64_t written = EventRing::kEvents + 100;
  const auto before = std::chrono::steady_clock::now().time_since_epoch();
  for (std::uint64_t i = 0; i < written; ++i) ring->write(numbered(i));
  const auto events = ring->read();
  ASSERT_EQ(events.size(), EventRing::kEvents);
  for (std::size_t i = 0; i < events.size(); ++i) {
    ASSERT_EQ(events[i].number, 100 + i);
    expect_whole(events[i]);
    ASSERT_GE(events[i].time, i == 0 ? std::chrono::nanoseconds(before).count() : events[i - 1].time);
  }
}

TEST(EventRing, ThreadsWriteAndAnotherReads) {
  const auto ring = std::make_unique<EventRing>();
  constexpr int kThreads = 3;
  constexpr std::uint64_t kEach = 20'000;
  std::atomic<int> ended{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (std::uint64_t i = 0; i < kEach; ++i) ring->write(numbered(kThreads * i + static_cast<std::uint64_t>(t)));
      ++ended;
    });
  }
  while (ended < kThreads) {
    for (const auto& event : ring->read()) expect_whole(event);
  }
  for (auto& thread : threads) thread.join();
  std::set<std::uint64_t> numbers;
  for (const auto& event : ring->read()) numbers.insert(event.number);
  EXPECT_EQ(numbers.size(), EventRing::kEvents);
}

TEST(EventNames, AreFoundAgain) {
  const auto first = fsdp::events::name_of("event_ring_test.first");
  const auto second = fsdp::events::name_of(std::string("event_ring_test.") + "second");
  EXPECT_NE(first, 0U);
  EXPECT_NE(first, second);
  EXPECT_EQ(fsdp::events::name_of(std::string("event_ring_test.") + "first"), first);
  EXPECT_EQ(fsdp::events::text_of(first), "event_ring_test.first");
  EXPECT_EQ(fsdp::events::text_of(second), "event_ring_test.second");
  EXPECT_EQ(fsdp::events::name_of(""), 0U);
  EXPECT_EQ(fsdp::events::text_of(0), "");
  EXPECT_EQ(fsdp::events::text_of(~0U), "");
}

TEST(EventNames, ThousandsFitAndTheRestIsNobodys) {
  std::vector<std::uint32_t> names;
  for (int i = 0; i < 10'000; ++i) names.push_back(fsdp::events::name_of("event_ring_test.many." + std::to_string(i)));
  std::size_t known = 0;
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (names[i] == 0) continue;
    ++known;
    ASSERT_EQ(fsdp::events::text_of(names[i]), "event_ring_test.many." + std::to_string(i));
  }
  EXPECT_GT(known, 4000U);
  EXPECT_LT(known, names.size());
}

}  // namespace event_ring_test
