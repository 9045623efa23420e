#include "report/waits.h"

#include <gtest/gtest.h>

#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "events/event_ring.h"

namespace waits_test {

using fsdp::WaitReason;
using fsdp::events::EngineReplay;
using fsdp::events::Event;
using fsdp::events::EventKind;
using fsdp::events::RankReplay;
using fsdp::report::Activity;
using fsdp::report::queued_bytes;
using fsdp::report::reasons_of;

constexpr std::uint32_t kEngine = 1001;
constexpr std::uint32_t kRow = 1002;

/// Events as an engine and a row would write them, at times that a test says.
class Script {
 public:
  Script& step(std::int64_t time, std::int64_t sent = 0, std::uint64_t read = 0) {
    return add({.time = time, .bytes = sent, .number = read, .source = kEngine, .kind = EventKind::kStepBegan});
  }
  Script& enter(std::int64_t time, const std::string& unit, bool in_backward = false) {
    return add(
        {.time = time, .source = kEngine, .unit = fsdp::events::name_of(unit), .kind = EventKind::kEntered, .in_backward = in_backward});
  }
  Script& backward_began(std::int64_t time) { return add({.time = time, .source = kEngine, .kind = EventKind::kBackwardBegan}); }
  Script& backward_ended(std::int64_t time, bool last = true) {
    return add({.time = time, .number = last ? 1U : 0U, .source = kEngine, .kind = EventKind::kBackwardEnded});
  }
  Script& peak(std::int64_t time, std::int64_t bytes, const std::string& unit) {
    return add({.time = time, .bytes = bytes, .source = kEngine, .unit = fsdp::events::name_of(unit), .kind = EventKind::kMemoryPeaked});
  }
  Script& call(EventKind kind, std::int64_t time, std::uint64_t number, const std::string& unit, std::int64_t bytes = 100,
               const std::string& operation = "all-gather") {
    return add({.time = time,
                .bytes = bytes,
                .number = number,
                .source = kRow,
                .unit = fsdp::events::name_of(unit),
                .operation = fsdp::events::name_of(operation),
                .kind = kind});
  }
  const std::vector<Event>& events() const { return events_; }

 private:
  Script& add(const Event& event) {
    events_.push_back(event);
    return *this;
  }
  std::vector<Event> events_;
};

std::map<fsdp::report::CollectiveKey, fsdp::report::Collective> collectives_of(const std::vector<Event>& events) {
  return RankReplay(events, fsdp::events::text_of, kEngine).collectives;
}

EngineReplay engine_of(const std::vector<Event>& events, std::int64_t now) {
  auto engine = RankReplay(events, fsdp::events::text_of, kEngine).engines.front();
  engine.end_at(now);
  return engine;
}

std::int64_t of(const std::array<std::int64_t, fsdp::kWaitReasons>& reasons, WaitReason reason) {
  return reasons[static_cast<std::size_t>(reason)];
}

void expect_sum(const std::array<std::int64_t, fsdp::kWaitReasons>& reasons, std::int64_t wait) {
  EXPECT_EQ(std::accumulate(reasons.begin(), reasons.end(), std::int64_t{0}), wait);
}

TEST(Waits, AreDividedAtTheLastCallAndAtTheArrival) {
  Script script;
  script.step(0).call(EventKind::kPosted, 10, 1, "a").enter(20, "x").call(EventKind::kWaitBegan, 100, 1, "a");
  script.call(EventKind::kArrived, 180, 1, "a").call(EventKind::kWaitEnded, 200, 1, "a");
  const auto all = collectives_of(script.events());
  const auto& collective = all.at({kRow, 1});
  const auto late = reasons_of(collective, 150, 0);
  EXPECT_EQ(of(late, WaitReason::kLateRank), 50);
  EXPECT_EQ(of(late, WaitReason::kLink), 30);
  EXPECT_EQ(of(late, WaitReason::kHost), 20);
  expect_sum(late, 100);
  // Nobody was late.
  const auto in_time = reasons_of(collective, 90, 0);
  EXPECT_EQ(of(in_time, WaitReason::kLateRank), 0);
  EXPECT_EQ(of(in_time, WaitReason::kLink), 80);
  // What is known of the peer says that it came after the end: clocks are not exact.
  const auto after = reasons_of(collective, 300, 0);
  EXPECT_EQ(of(after, WaitReason::kLateRank), 100);
  expect_sum(after, 100);
}

TEST(Waits, AQueueTakesTheShareOfItsBytes) {
  Script script;
  script.step(0).call(EventKind::kPosted, 10, 1, "a", 300).call(EventKind::kPosted, 20, 2, "b", 100);
  script.call(EventKind::kWaitBegan, 100, 2, "b", 100).call(EventKind::kWaitEnded, 180, 2, "b", 100);
  const auto all = collectives_of(script.events());
  const auto& second = all.at({kRow, 2});
  EXPECT_EQ(queued_bytes(second, 0, all), 300);
  const auto reasons = reasons_of(second, 0, 300);
  EXPECT_EQ(of(reasons, WaitReason::kQueue), 60);
  EXPECT_EQ(of(reasons, WaitReason::kLink), 20);
  EXPECT_EQ(queued_bytes(all.at({kRow, 1}), 0, all), 0);  // What came later is not before it.
  // Done when all ranks had called.
  Script done;
  done.step(0).call(EventKind::kPosted, 10, 1, "a", 300).call(EventKind::kPosted, 20, 2, "b", 100);
  done.call(EventKind::kWaitBegan, 30, 1, "a", 300).call(EventKind::kWaitEnded, 50, 1, "a", 300);
  done.call(EventKind::kWaitBegan, 100, 2, "b", 100).call(EventKind::kWaitEnded, 180, 2, "b", 100);
  const auto after = collectives_of(done.events());
  EXPECT_EQ(queued_bytes(after.at({kRow, 2}), 60, after), 0);
  EXPECT_EQ(queued_bytes(after.at({kRow, 2}), 40, after), 300);
}

TEST(Waits, AGatherThatBeganWhenItWasNeededIsForPrefetch) {
  Script script;
  script.step(0).enter(10, "a").call(EventKind::kPosted, 11, 1, "a").call(EventKind::kWaitBegan, 12, 1, "a");
  script.call(EventKind::kWaitEnded, 20, 1, "a");
  script.enter(30, "b").call(EventKind::kPosted, 31, 2, "b").call(EventKind::kPosted, 32, 3, "c");
  script.call(EventKind::kWaitBegan, 33, 2, "b").call(EventKind::kWaitEnded, 40, 2, "b");
  script.enter(50, "c").call(EventKind::kWaitBegan, 51, 3, "c").call(EventKind::kWaitEnded, 60, 3, "c");
  script.backward_began(70).enter(71, "c", true).call(EventKind::kPosted, 72, 4, "c").call(EventKind::kWaitBegan, 73, 4, "c");
  script.call(EventKind::kWaitEnded, 80, 4, "c");
  script.enter(90, "b", true).call(EventKind::kPosted, 91, 5, "c", 100, "reduce-scatter");
  script.call(EventKind::kWaitBegan, 92, 5, "c", 100, "reduce-scatter").call(EventKind::kWaitEnded, 99, 5, "c", 100, "reduce-scatter");
  const auto all = collectives_of(script.events());
  EXPECT_FALSE(all.at({kRow, 1}).posted_on_demand) << "nothing was computed before the first unit";
  EXPECT_TRUE(all.at({kRow, 2}).posted_on_demand);
  EXPECT_FALSE(all.at({kRow, 3}).posted_on_demand);
  EXPECT_FALSE(all.at({kRow, 4}).posted_on_demand) << "nothing was computed before the first unit of backward";
  EXPECT_FALSE(all.at({kRow, 5}).posted_on_demand) << "a reduction can't begin before its gradients are there";
  EXPECT_EQ(of(reasons_of(all.at({kRow, 2}), 0, 0), WaitReason::kPrefetch), 7);
  EXPECT_FALSE(all.at({kRow, 3}).in_backward);
  EXPECT_TRUE(all.at({kRow, 4}).in_backward);
}

TEST(Waits, TellWhatTookTheTimeBeforeACall) {
  Script script;
  const auto a = fsdp::events::name_of("a");
  const auto b = fsdp::events::name_of("b");
  script.step(0).enter(10, "a").call(EventKind::kPosted, 12, 1, "a").enter(100, "b").call(EventKind::kPosted, 103, 2, "b");
  script.call(EventKind::kWaitBegan, 104, 2, "b").call(EventKind::kWaitEnded, 300, 2, "b").call(EventKind::kPosted, 320, 3, "c");
  script.backward_began(330).enter(331, "b", true).call(EventKind::kPosted, 332, 4, "b").backward_ended(340);
  script.step(1000).enter(1001, "a").call(EventKind::kPosted, 1002, 5, "a");
  const auto all = collectives_of(script.events());
  const auto before = [&](std::uint64_t number) { return all.at({kRow, number}).before; };
  EXPECT_EQ(before(2).kind, Activity::Kind::kForward);
  EXPECT_EQ(before(2).unit, a);
  EXPECT_EQ(before(2).next, b);
  EXPECT_EQ(before(3).kind, Activity::Kind::kWaiting);
  EXPECT_EQ(before(3).unit, b);
  EXPECT_EQ(before(4).kind, Activity::Kind::kForward);
  EXPECT_EQ(before(5).kind, Activity::Kind::kBetweenSteps);
}

// A report and a notice that ask whether the rank waits must have one answer.
TEST(RankReplay, AnotherWaitsEndEndsNoWait) {
  for (const auto end : {EventKind::kWaitEnded, EventKind::kFailed}) {
    Script script;
    script.step(0).enter(10, "a").call(EventKind::kPosted, 11, 1, "a").call(EventKind::kPosted, 12, 2, "b");
    script.call(EventKind::kWaitBegan, 20, 1, "a").call(EventKind::kWaitBegan, 30, 2, "b").call(end, 40, 2, "b");
    script.call(end, 50, 7, "z");  // The beginning of this wait is no longer kept.
    script.call(EventKind::kPosted, 90, 3, "c");
    const RankReplay rank(script.events(), fsdp::events::text_of);
    EXPECT_EQ(rank.open_waits, (std::vector<fsdp::report::CollectiveKey>{{kRow, 1}}));
    ASSERT_NE(rank.awaited(kRow), nullptr);
    EXPECT_EQ(rank.awaited(kRow)->call.number, 1U);
    EXPECT_EQ(rank.awaited(kRow + 1), nullptr);
    const auto& before = rank.collectives.at({kRow, 3}).before;
    EXPECT_EQ(before.kind, Activity::Kind::kWaiting) << "it still waits for the first one";
    EXPECT_EQ(before.awaited, (fsdp::report::CollectiveKey{kRow, 1}));
    EXPECT_EQ(rank.last_call(kRow), 3U);
    EXPECT_EQ(rank.last_call(kRow + 1), 0U);
  }
}

TEST(RankReplay, EventsMayBeInAnyOrder) {
  Script script;
  script.call(EventKind::kWaitEnded, 30, 1, "a").call(EventKind::kWaitBegan, 20, 1, "a").enter(40, "b", true).step(0);
  const RankReplay rank(script.events(), fsdp::events::text_of);
  EXPECT_TRUE(rank.open_waits.empty());
  EXPECT_EQ(rank.position.kind, Activity::Kind::kBackward);
  EXPECT_EQ(rank.last_move, 40);
}

TEST(RankReplay, AStepThatFailedKeepsItsNumber) {
  Script script;
  script.step(10).backward_began(20).backward_ended(30).step(40).backward_began(50).step(60);
  const auto steps = engine_of(script.events(), 70).steps;
  ASSERT_EQ(steps.size(), 3U);
  EXPECT_EQ(steps[0].number, 1);
  EXPECT_EQ(steps[1].number, 2);
  EXPECT_EQ(steps[2].number, 2) << "the forward begins the step again";
}

TEST(Steps, EndWithTheLastBackward) {
  Script script;
  script.backward_ended(5);  // of a step whose beginning is not kept any more
  script.step(10, 100, 40).enter(11, "a").backward_began(20).backward_ended(40, false);
  script.enter(41, "a").backward_began(50).peak(55, 7000, "a").backward_ended(70);
  script.step(100, 300, 60).backward_began(110).peak(112, 5000, "b").peak(113, 6000, "c").backward_ended(150);
  const auto engine = engine_of(script.events(), 170);
  const auto steps = engine.whole_steps();
  ASSERT_EQ(steps.size(), 2U);
  const auto time_in = [&](Activity::Kind kind, std::size_t step) { return engine.time_in(kind, steps[step].began, steps[step].ended); };
  EXPECT_EQ(steps[0].began, 10);
  EXPECT_EQ(steps[0].ended, 100);
  EXPECT_EQ(time_in(Activity::Kind::kForward, 0), 10 + 10);
  EXPECT_EQ(time_in(Activity::Kind::kBackward, 0), 20 + 20);
  EXPECT_EQ(time_in(Activity::Kind::kBetweenSteps, 0), 30);
  EXPECT_EQ(steps[0].sent_before, 100);
  EXPECT_EQ(steps[0].read_before, 40);
  EXPECT_EQ(steps[0].peak, 7000);
  EXPECT_EQ(steps[1].ended, 170);
  EXPECT_EQ(time_in(Activity::Kind::kBetweenSteps, 1), 20);
  EXPECT_EQ(steps[1].peak, 6000);
  EXPECT_EQ(steps[1].peak_unit, fsdp::events::name_of("c"));
  // One that has not ended does not count.
  script.step(200);
  const auto same = engine_of(script.events(), 210).whole_steps();
  ASSERT_EQ(same.size(), 2U);
  EXPECT_EQ(same[1].ended, 200);
  // A backward that failed: the next forward begins the step again.
  script.backward_began(220).step(230).backward_began(240).backward_ended(250);
  const auto again = engine_of(script.events(), 260).whole_steps();
  ASSERT_EQ(again.size(), 3U);
  EXPECT_EQ(again[2].began, 230);
}

}  // namespace waits_test
