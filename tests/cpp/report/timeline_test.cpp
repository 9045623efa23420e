#include "report/timeline.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "fsdp/error.h"
#include "report/synthetic_ranks.h"
#include "report/timeline_files.h"

namespace timeline_test {

using fsdp::WaitReason;
using fsdp::events::EventKind;
using fsdp::report::Activity;
using fsdp::report::clock_offsets;
using fsdp::report::CollectiveSpan;
using fsdp::report::Lane;
using fsdp::report::parse_steps;
using fsdp::report::RankEvents;
using fsdp::report::Timeline;
using fsdp::report::timeline_of;
using fsdp::report::waited;
using fsdp::testing::SyntheticRank;

const std::string kRow = "dp_shard 0-1 #1";

std::int64_t of(const CollectiveSpan& span, WaitReason reason) { return span.reasons[static_cast<std::size_t>(reason)]; }

std::string unit_of(const Timeline& timeline, const CollectiveSpan& span) { return timeline.names[span.unit]; }

const CollectiveSpan& only_wait(const Timeline& timeline, std::size_t rank) {
  const auto& all = timeline.ranks[rank].collectives;
  return *std::find_if(all.begin(), all.end(), [](const auto& span) { return waited(span) > 0 || fsdp::report::is_unfinished(span); });
}

TEST(Timeline, CollectivesAreInTheLanesOfTheirOperations) {
  SyntheticRank rank(0, 2);
  rank.step(0).enter(10, "a");
  rank.collective({.posted = 20, .wait_began = 25, .arrived = 28, .wait_ended = 30}, 1, "a", "all-gather");
  rank.collective({.posted = 31, .wait_began = 50, .arrived = 0, .wait_ended = 60}, 2, "b", "all-gather after forward");
  rank.collective({.posted = 40, .wait_began = 70, .arrived = 0, .wait_ended = 80}, 3, "c", "all-gather");
  rank.collective({.posted = 41, .wait_began = 0, .arrived = 0, .wait_ended = 90}, 4, "a", "reduce-scatter");
  rank.collective({.posted = 42, .wait_began = 91, .arrived = 0, .wait_ended = 92}, 5, "a", "outer reduce-scatter");
  rank.collective({.posted = 43, .wait_began = 43, .arrived = 0, .wait_ended = 44}, 6, "(all)", "gradient norm");
  const auto timeline = timeline_of({rank.events()});
  const auto& all = timeline.ranks[0].collectives;
  ASSERT_EQ(all.size(), 6U);
  const std::vector<Lane> lanes = {Lane::kGather, Lane::kGather, Lane::kGather, Lane::kReduce, Lane::kOuter, Lane::kHost};
  for (std::size_t i = 0; i < all.size(); ++i) {
    EXPECT_EQ(all[i].lane, lanes[i]) << i;
    EXPECT_EQ(all[i].number, i + 1) << "by the time of the call";
  }
  // The third one began before the second had ended.
  EXPECT_EQ(all[0].track, 0U);
  EXPECT_EQ(all[1].track, 0U);
  EXPECT_EQ(all[2].track, 1U);
  EXPECT_EQ(unit_of(timeline, all[1]), "b");
  EXPECT_EQ(timeline.names[all[5].operation], "gradient norm");
  EXPECT_EQ(timeline.names[all[5].row], kRow);
  EXPECT_EQ(all[0].times.arrived, 28);
  EXPECT_EQ(waited(all[3]), 0);
  EXPECT_EQ(timeline.began, 0);
  EXPECT_EQ(timeline.ended, 92);
}

TEST(Timeline, AWaitNamesTheLateRankAndWhatItDid) {
  SyntheticRank waiter(0, 2);
  waiter.step(0).collective({.posted = 1, .wait_began = 0, .arrived = 0, .wait_ended = 4}, 1, "a", "all-gather").enter(5, "a");
  waiter.collective({.posted = 10, .wait_began = 20, .arrived = 95, .wait_ended = 100}, 2, "b", "all-gather");
  SyntheticRank late(1, 2);
  late.step(0).collective({.posted = 1, .wait_began = 0, .arrived = 0, .wait_ended = 4}, 1, "a", "all-gather").enter(5, "a").enter(75, "b");
  late.collective({.posted = 80, .wait_began = 81, .arrived = 0, .wait_ended = 96}, 2, "b", "all-gather");
  const auto timeline = timeline_of({waiter.events(), late.events()});
  const auto& wait = only_wait(timeline, 0);
  EXPECT_EQ(of(wait, WaitReason::kLateRank), 60);
  EXPECT_EQ(of(wait, WaitReason::kLink), 15);
  EXPECT_EQ(of(wait, WaitReason::kHost), 5);
  EXPECT_EQ(std::accumulate(wait.reasons.begin(), wait.reasons.end(), std::int64_t{0}), waited(wait));
  EXPECT_EQ(wait.late_rank, 1);
  EXPECT_EQ(timeline.names[wait.late_rank_was], "in forward of 'a', before 'b'");
  EXPECT_EQ(fsdp::report::longest_wait(timeline),
            "rank 0 waited 0.00 ms for the all-gather of 'b': rank 1 was in forward of 'a', before 'b'");
  EXPECT_EQ(only_wait(timeline, 1).late_rank, -1) << "nobody was later than the late one";
}

TEST(Timeline, ARankThatHasNotCalledIsLateUntilNow) {
  SyntheticRank waiter(0, 2);
  waiter.step(0).enter(5, "a").call(EventKind::kPosted, 10, 1, "b", "all-gather").call(EventKind::kWaitBegan, 20, 1, "b", "all-gather");
  SyntheticRank missing(1, 2);
  missing.step(0).enter(500, "a");
  missing.add_row(kRow);
  const auto timeline = timeline_of({waiter.events(), missing.events()});
  const auto& wait = only_wait(timeline, 0);
  EXPECT_EQ(wait.state, CollectiveSpan::State::kOpen);
  EXPECT_EQ(waited(wait), 480) << "until the last moment of all ranks";
  EXPECT_EQ(of(wait, WaitReason::kLateRank), 480);
  EXPECT_EQ(wait.late_rank, 1);
  EXPECT_EQ(timeline.names[wait.late_rank_was], "in forward of 'a'");
}

TEST(Timeline, OnlyWhoWaitsIsDrawnUntilNow) {
  for (const bool waits : {false, true}) {
    SyntheticRank rank(0, 2);
    rank.step(0).call(EventKind::kPosted, 10, 1, "b", "all-gather").call(EventKind::kWaitBegan, 20, 1, "b", "all-gather");
    if (!waits) rank.call(EventKind::kWaitEnded, 30, 1, "b", "all-gather");
    auto events = rank.events();
    events.process = fsdp::report::ProcessState::kRunning;
    const auto timeline = timeline_of({events});
    EXPECT_EQ(timeline.ended > 1'000'000, waits) << "a process may live on and train no more";
    EXPECT_EQ(timeline.ranks[0].steps[0].ended, timeline.ended);
  }
}

TEST(Timeline, WhoWaitsForTheDrawingProcessIsNotHanging) {
  SyntheticRank waiter(0, 2);
  waiter.step(0).call(EventKind::kPosted, 10, 1, "b", "all-gather").call(EventKind::kWaitBegan, 20, 1, "b", "all-gather");
  SyntheticRank drawer(1, 2);
  auto ranks = std::vector<RankEvents>{waiter.events(), drawer.step(0).enter(25, "a").events()};
  for (auto& rank : ranks) rank.process = fsdp::report::ProcessState::kRunning;
  ranks[1].writer.process = getpid();
  EXPECT_EQ(timeline_of(ranks).ended, 25);
}

TEST(Timeline, WaitsAfterTrainingAreNotTheLongest) {
  SyntheticRank rank(0, 2);
  rank.step(0).collective({.posted = 10, .wait_began = 11, .arrived = 0, .wait_ended = 2'000'011}, 1, "a", "all-gather");
  rank.backward_ended(2'000'100, 1).step(2'000'200);
  rank.collective({.posted = 2'000'300, .wait_began = 2'000'300, .arrived = 0, .wait_ended = 9'000'000}, 2, "", "saving");
  EXPECT_EQ(fsdp::report::longest_wait(timeline_of({rank.events()})), "rank 0 waited 2.00 ms for the all-gather of 'a': link");
}

// 0 waits for 2 in a row of both, and 2 for 3 in another one.
TEST(Timeline, ALateRankThatWaitedIsFollowedToTheFirstCause) {
  for (const bool hangs : {false, true}) {
    SyntheticRank first(0, 4);
    SyntheticRank middle(2, 4);
    SyntheticRank late(3, 4);
    for (auto* rank : {&first, &middle}) {
      rank->step(0).in_row(rank->add_source("outer 0 2 #1"));
      rank->collective({.posted = 1, .wait_began = 2, .arrived = 0, .wait_ended = 3}, 1, "a", "all-gather");
    }
    late.step(0);
    for (auto* rank : {&middle, &late}) {
      rank->in_row(rank->add_source("inner 2 3 #1"));
      rank->collective({.posted = 4, .wait_began = 5, .arrived = 0, .wait_ended = 6}, 1, "a", "all-gather").enter(7, "a");
    }
    first.call(EventKind::kPosted, 30, 2, "b", "all-gather").call(EventKind::kWaitBegan, 31, 2, "b", "all-gather");
    middle.call(EventKind::kPosted, 10, 2, "b", "all-gather").call(EventKind::kWaitBegan, 11, 2, "b", "all-gather");
    if (!hangs) {
      late.collective({.posted = 500, .wait_began = 501, .arrived = 0, .wait_ended = 510}, 2, "b", "all-gather");
      middle.call(EventKind::kWaitEnded, 510, 2, "b", "all-gather").in_row(3);
      middle.collective({.posted = 520, .wait_began = 521, .arrived = 0, .wait_ended = 530}, 2, "b", "all-gather");
      first.call(EventKind::kWaitEnded, 530, 2, "b", "all-gather");
    }
    auto ranks = std::vector<RankEvents>{first.events(), middle.events(), late.events()};
    if (hangs) ranks[0].alive = 600;
    const auto timeline = timeline_of(ranks);
    const auto& wait = timeline.ranks[0].collectives.back();
    EXPECT_EQ(waited(wait), hangs ? 569 : 499);
    EXPECT_EQ(wait.late_rank, 3);
    EXPECT_EQ(timeline.names[wait.late_rank_was], "in forward of 'a'");
    EXPECT_EQ(timeline.why.rank, hangs ? 3 : -1) << timeline.why.text;
    const auto said = fsdp::report::longest_wait(timeline);
    EXPECT_NE(said.find(": rank 3 was in forward of 'a'"), std::string::npos) << said;
  }
}

// Rank 1 was killed in a collective that it had called; its peers lived on.
TEST(Timeline, AWaitInVainIsTheLongestHoweverShort) {
  std::vector<RankEvents> ranks;
  for (int number = 0; number < 3; ++number) {
    SyntheticRank rank(number, 3);
    rank.step(0).collective({.posted = 10, .wait_began = 11, .arrived = 0, .wait_ended = 9000}, 1, "a", "all-gather");
    rank.backward_ended(9001, 1).step(9002).enter(9010, "a");
    rank.call(EventKind::kPosted, 9020, 2, "b", "all-gather").call(EventKind::kWaitBegan, 9021, 2, "b", "all-gather");
    if (number != 1) rank.call(EventKind::kFailed, 9050, 2, "b", "all-gather");
    ranks.push_back(rank.events());
    ranks.back().process = fsdp::report::ProcessState::kDead;
  }
  const auto timeline = timeline_of(ranks);
  EXPECT_EQ(timeline.why.rank, 1) << timeline.why.text;
  EXPECT_EQ(fsdp::report::longest_wait(timeline),
            "rank 0 waited 0.00 ms for the all-gather of 'b': rank 1 was waiting for a collective of 'b'");
  const auto& killed = timeline.ranks[1].collectives.back();
  EXPECT_TRUE(fsdp::report::is_unfinished(killed));
  EXPECT_EQ(waited(killed), 0) << "until its last sign of life";
}

TEST(Timeline, RanksThatWaitForEachOtherAreBothLate) {
  std::vector<RankEvents> ranks;
  for (int number = 0; number < 2; ++number) {
    SyntheticRank rank(number, 2);
    rank.step(0);
    for (const auto* row : {"inner 0 1 #1", "outer 0 1 #1"}) {
      const auto source = rank.add_source(row);
      if ((row[0] == 'i') == (number == 0))
        rank.in_row(source).call(EventKind::kPosted, 10, 1, "a", "all-gather").call(EventKind::kWaitBegan, 11, 1, "a", "all-gather");
    }
    ranks.push_back(rank.events());
  }
  const auto timeline = timeline_of(ranks);
  EXPECT_EQ(timeline.why.cause, fsdp::report::Cause::kEachOther);
  for (std::size_t rank = 0; rank < 2; ++rank) EXPECT_EQ(only_wait(timeline, rank).late_rank, static_cast<std::int64_t>(1 - rank));
}

TEST(Timeline, AFailureEndsAWait) {
  SyntheticRank rank(0, 2);
  rank.step(0).call(EventKind::kPosted, 10, 1, "b", "all-gather").call(EventKind::kWaitBegan, 20, 1, "b", "all-gather");
  rank.call(EventKind::kFailed, 70, 1, "b", "all-gather").enter(90, "a");
  const auto timeline = timeline_of({rank.events()});
  EXPECT_EQ(only_wait(timeline, 0).state, CollectiveSpan::State::kFailed);
  EXPECT_EQ(waited(only_wait(timeline, 0)), 50);
}

TEST(Timeline, TheComputationIsInOnePlaceAfterTheOther) {
  SyntheticRank rank(0, 1);
  rank.step(0).enter(10, "a").enter(20, "b").backward_began(30).enter(31, "b", true).backward_ended(50, 7).step(60).enter(65, "a");
  rank.peak(66, 900, "a");
  const auto timeline = timeline_of({rank.events()});
  const auto& spans = timeline.ranks[0].compute;
  ASSERT_EQ(spans.size(), 8U);
  for (std::size_t i = 1; i < spans.size(); ++i) EXPECT_EQ(spans[i - 1].ended, spans[i].began);
  EXPECT_EQ(spans[1].kind, Activity::Kind::kForward);
  EXPECT_EQ(timeline.names[spans[2].unit], "b");
  EXPECT_EQ(spans[4].kind, Activity::Kind::kBackward);
  EXPECT_EQ(spans[5].kind, Activity::Kind::kBetweenSteps);
  EXPECT_EQ(spans.back().ended, 66);
  ASSERT_EQ(timeline.ranks[0].peaks.size(), 1U);
  EXPECT_EQ(timeline.ranks[0].peaks[0].bytes, 900);
  const auto& steps = timeline.ranks[0].steps;
  ASSERT_EQ(steps.size(), 2U);
  EXPECT_EQ(steps[0].number, 7) << "as the rank has counted it: earlier ones are no longer kept";
  EXPECT_TRUE(steps[0].is_whole);
  EXPECT_EQ(steps[0].ended, 60);
  EXPECT_EQ(steps[1].number, 8);
  EXPECT_FALSE(steps[1].is_whole);
}

TEST(Timeline, MemoryIsWhatTheEngineHeldOfEachKind) {
  constexpr std::uint64_t kGathered = 2;
  constexpr std::uint64_t kUnreduced = 3;
  SyntheticRank rank(0, 1);
  rank.enter(1, "z").hold(2, kGathered, 77);  // What there was of the others is not known any more.
  rank.step(10).hold_all(11, {100, 0, 70, 0, 0, 200}).enter(20, "a").hold(21, kGathered, 90);
  rank.backward_began(30).hold_all(31, {100, 0, 90, 0, 0, 200}).enter(40, "a", true).hold(41, kGathered, 60).hold(42, kUnreduced, 25);
  rank.enter(50, "z", true).backward_ended(60, 1).hold(61, kGathered, 0);
  const auto timeline = timeline_of({rank.events()});
  const auto& memory = timeline.ranks[0].memory;
  std::vector<std::int64_t> times;
  for (const auto& moment : memory) times.push_back(moment.time);
  EXPECT_EQ(times, (std::vector<std::int64_t>{10, 20, 30, 40, 60})) << "when the computation moved, if something has changed";
  using Held = fsdp::report::BytesByKind;
  EXPECT_EQ(memory[0].held, (Held{100, 0, 70, 0, 0, 200}));
  EXPECT_EQ(memory[1].held, (Held{100, 0, 90, 0, 0, 200}));
  EXPECT_EQ(memory[3].held, (Held{100, 0, 60, 25, 0, 200}));
  EXPECT_EQ(memory[4].held, (Held{100, 0, 0, 25, 0, 200}));
}

TEST(Timeline, StepsTellWhatTheyHaveSentAndTheirPeaks) {
  SyntheticRank rank(0, 1);
  rank.step(0, 1000, 400).enter(10, "a").peak(11, 300, "a").peak(12, 500, "a").backward_ended(20, 1).peak_of_kind(21, 2, 70);
  rank.peak_of_kind(30, 2, 90).peak_of_kind(30, 5, 8).step(31, 1600, 900).enter(40, "a").peak(41, 200, "a").backward_ended(50, 2);
  const auto timeline = timeline_of({rank.events()});
  const auto& steps = timeline.ranks[0].steps;
  ASSERT_EQ(steps.size(), 2U);
  EXPECT_EQ(steps[0].sent, 600);
  EXPECT_EQ(steps[0].read_by_peers, 500);
  EXPECT_EQ(steps[0].peak, 500);
  EXPECT_EQ(steps[0].peaks, (fsdp::report::BytesByKind{0, 0, 90, 0, 0, 8})) << "with what the update has needed";
  EXPECT_EQ(steps[1].sent, -1) << "not known before the next one begins";
  EXPECT_EQ(steps[1].peak, 200);
}

TEST(Timeline, StepsChooseWhatIsShown) {
  std::vector<RankEvents> ranks;
  for (int number = 0; number < 2; ++number) {
    SyntheticRank rank(number, 2);
    rank.backward_ended(1, 3);  // the end of a step whose beginning is no longer kept
    for (int step = 0; step < 4; ++step) {
      const auto begin = 100 * step + 10 + number;
      rank.step(begin).enter(begin + 1, "a");
      rank.collective({.posted = begin + 2, .wait_began = begin + 3, .arrived = 0, .wait_ended = begin + 9},
                      static_cast<std::uint64_t>(step) + 1, "a", "all-gather");
      rank.backward_ended(begin + 50, 4 + static_cast<std::uint64_t>(step));
    }
    ranks.push_back(rank.events());
  }
  const auto timeline = timeline_of(ranks, {{5, 6}});
  for (const auto& rank : timeline.ranks) {
    ASSERT_EQ(rank.steps.size(), 2U);
    EXPECT_EQ(rank.steps.front().number, 5);
    EXPECT_EQ(rank.collectives.size(), 2U);
  }
  EXPECT_EQ(timeline.began, 110);
  EXPECT_EQ(timeline.ended, 311) << "the other rank's next step began then";
  EXPECT_EQ(timeline_of(ranks).ranks[0].steps.size(), 4U);
  EXPECT_THROW(timeline_of(ranks, {{8, 9}}), fsdp::Error);
  EXPECT_THROW(timeline_of({}), fsdp::Error);
}

TEST(Timeline, RanksWithoutAFileAreTold) {
  SyntheticRank rank(1, 4);
  rank.step(0);
  EXPECT_EQ(timeline_of({rank.events()}).missing, (std::vector<std::int64_t>{0, 2, 3}));
}

// A second model, whose events tell where its own computation is.
TEST(Timeline, CollectivesOfAnotherModelAreSeenByItsOwnEvents) {
  SyntheticRank rank(0, 2);
  rank.step(0).enter(1, "a").enter(2, "b").backward_began(3).enter(4, "b", true);
  const auto other = rank.add_source("model #2");
  rank.from(other).enter(5, "c").from(1);
  rank.collective({.posted = 6, .wait_began = 7, .arrived = 0, .wait_ended = 9}, 1, "c", "all-gather");
  const auto timeline = timeline_of({rank.events()});
  EXPECT_FALSE(only_wait(timeline, 0).in_backward) << "'c' is in forward, while the first model is in backward";
}

/// Two ranks of two hosts, whose clocks differ, in collectives that take some time.
std::vector<RankEvents> two_hosts(std::int64_t ahead, std::int64_t shortest) {
  std::vector<RankEvents> ranks;
  for (int number = 0; number < 2; ++number) {
    SyntheticRank rank(number, 2);
    const auto clock = number * ahead;
    rank.step(clock);
    for (int i = 0; i < 10; ++i) {
      // One of them calls later, in turns; the data take a while.
      const auto posted = 1000 * i + (i % 2 == number ? 300 : 0);
      const auto ended = 1000 * i + 300 + shortest + 7 * i;
      rank.collective({.posted = posted + clock, .wait_began = posted + 1 + clock, .arrived = 0, .wait_ended = ended + clock},
                      static_cast<std::uint64_t>(i) + 1, "a", "all-gather");
    }
    auto events = rank.events();
    events.writer.clock = static_cast<std::uint64_t>(number) + 1;
    ranks.push_back(events);
  }
  return ranks;
}

TEST(ClockAlignment, FindsTheOffsetFromCollectives) {
  for (const std::int64_t ahead : {0, 123456789, -5000}) {
    const auto clocks = clock_offsets(two_hosts(ahead, 40));
    EXPECT_EQ(clocks[0].ahead, 0);
    EXPECT_EQ(clocks[0].within, 0);
    EXPECT_NEAR(static_cast<double>(clocks[1].ahead), static_cast<double>(ahead), 4.0) << "messages take about as long both ways";
    EXPECT_GE(clocks[1].within, std::abs(clocks[1].ahead - ahead)) << "it says how exact it is";
    EXPECT_LE(clocks[1].within, 47);
  }
  // The reasons do not depend on it: rank 1 calls 300 later, half of the times.
  const auto timeline = timeline_of(two_hosts(123456789, 40));
  EXPECT_NEAR(static_cast<double>(of(only_wait(timeline, 1), WaitReason::kLateRank)), 299.0, 47.0);
  EXPECT_LT(timeline.ended, 20000);
}

// The rank that sends does not wait for the other one.
TEST(ClockAlignment, IgnoresMessagesThatGoOneWay) {
  std::vector<RankEvents> ranks;
  for (int number = 0; number < 2; ++number) {
    SyntheticRank rank(number, 2);
    rank.step(0);
    rank.collective({.posted = 100, .wait_began = 110, .arrived = 0, .wait_ended = 140}, 1, "a", "all-gather");
    rank.collective({.posted = number == 0 ? 200 : 800, .wait_began = 0, .arrived = 0, .wait_ended = number == 0 ? 210 : 840}, 2, "a",
                    "scatter of first values");
    auto events = rank.events();
    events.writer.clock = static_cast<std::uint64_t>(number) + 1;
    ranks.push_back(events);
  }
  EXPECT_EQ(clock_offsets(ranks)[1].ahead, 0);
  EXPECT_EQ(clock_offsets(ranks)[1].within, 40);
}

TEST(ClockAlignment, OfOneHostIsExact) {
  auto ranks = two_hosts(0, 40);
  ranks[1].writer.clock = ranks[0].writer.clock;
  ranks[1].writer.ahead_of_epoch = 77;
  const auto clocks = clock_offsets(ranks);
  EXPECT_EQ(clocks[1].ahead, 0);
  EXPECT_EQ(clocks[1].within, 0);
}

TEST(ClockAlignment, WithoutCollectivesTheHostsAreBelieved) {
  SyntheticRank first(0, 2);
  SyntheticRank second(1, 2);
  auto ranks = std::vector<RankEvents>{first.step(0).events(), second.step(0).events()};
  ranks[0].writer.clock = 1;
  ranks[1].writer.clock = 2;
  ranks[0].writer.ahead_of_epoch = 1000;
  ranks[1].writer.ahead_of_epoch = 400;
  EXPECT_EQ(clock_offsets(ranks)[1].ahead, 600);
  EXPECT_EQ(clock_offsets(ranks)[1].within, -1);
}

TEST(Timeline, RangesOfStepsAreParsed) {
  EXPECT_EQ(parse_steps("12-14"), std::pair(std::int64_t{12}, std::int64_t{14}));
  EXPECT_EQ(parse_steps("3"), std::pair(std::int64_t{3}, std::int64_t{3}));
  for (const char* text : {"", "a", "3-", "-3", "5-4", "0-2", "1-2-3", "1 2"}) EXPECT_THROW(parse_steps(text), fsdp::Error) << text;
}

}  // namespace timeline_test
