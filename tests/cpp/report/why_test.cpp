#include "report/why.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "events/event_ring.h"
#include "fsdp/error.h"
#include "report/event_files.h"
#include "support/temporary_folder.h"

namespace why_test {

using fsdp::events::EndKind;
using fsdp::events::Event;
using fsdp::events::EventKind;
using fsdp::report::Cause;
using fsdp::report::ProcessState;
using fsdp::report::RankEvents;
using fsdp::report::Why;

constexpr std::int64_t kMs = 1'000'000;

/// What one rank would have left in its file, event by event.
class Script {
 public:
  Script(std::int64_t rank, std::int64_t world_size) {
    left_.writer.rank = rank;
    left_.writer.world_size = world_size;
    left_.writer.process = 1000 + rank;
    left_.writer.made = time_;
    left_.writer.host = {'h', 'o', 's', 't'};
    left_.names = {""};
    left_.sources = {"", "model #1", "dp_shard 0-" + std::to_string(world_size - 1) + " #1"};
    left_.process = ProcessState::kRunning;
  }

  /// The row of the calls that follow.
  Script& in_row(const std::string& row) {
    const auto found = std::find(left_.sources.begin(), left_.sources.end(), row);
    row_ = static_cast<std::uint32_t>(found - left_.sources.begin());
    if (found == left_.sources.end()) left_.sources.push_back(row);
    return *this;
  }
  Script& enter(const std::string& unit, bool in_backward = false) {
    return add({.source = 1, .unit = name(unit), .kind = EventKind::kEntered, .in_backward = in_backward});
  }
  Script& between_steps() { return add({.number = 1, .source = 1, .kind = EventKind::kBackwardEnded}); }
  Script& post(std::uint64_t number, const std::string& unit, std::int64_t bytes = 64, const std::string& operation = "all-gather") {
    return add(
        {.bytes = bytes, .number = number, .source = row_, .unit = name(unit), .operation = name(operation), .kind = EventKind::kPosted});
  }
  Script& wait(std::uint64_t number) { return add({.number = number, .source = row_, .kind = EventKind::kWaitBegan}); }
  Script& done(std::uint64_t number) { return add({.number = number, .source = row_, .kind = EventKind::kWaitEnded}); }
  /// Calls and completes the first collectives.
  Script& begin(std::uint64_t count) {
    for (std::uint64_t n = 1; n <= count; ++n) post(n, "blocks." + std::to_string(n)).wait(n).done(n).enter("blocks." + std::to_string(n));
    return *this;
  }
  Script& fail(std::uint64_t number, const std::string& text) {
    add({.number = number, .source = row_, .kind = EventKind::kFailed});
    return add({.source = row_, .operation = name(text), .kind = EventKind::kGivenUp});
  }
  Script& end(EndKind how, const std::string& text = "") {
    return add({.number = static_cast<std::uint64_t>(how), .operation = name(text), .kind = EventKind::kEnded});
  }
  Script& after(std::int64_t ms) {
    time_ += ms * kMs;
    return *this;
  }
  Script& process(ProcessState state) {
    left_.process = state;
    return *this;
  }

  const RankEvents& left() const { return left_; }
  RankEvents& left() { return left_; }

 private:
  std::uint32_t name(const std::string& text) {
    const auto found = std::find(left_.names.begin(), left_.names.end(), text);
    const auto place = static_cast<std::uint32_t>(found - left_.names.begin());
    if (found == left_.names.end()) left_.names.push_back(text);
    return place;
  }
  Script& add(Event event) {
    event.time = time_ += kMs;
    left_.events.push_back(event);
    return *this;
  }

  RankEvents left_;
  std::int64_t time_ = 1'000'000 * kMs;
  std::uint32_t row_ = 2;
};

/// Ranks that have called and completed two collectives.
std::vector<Script> run_of(std::int64_t world_size) {
  std::vector<Script> ranks;
  for (std::int64_t rank = 0; rank < world_size; ++rank) ranks.emplace_back(rank, world_size).begin(2);
  return ranks;
}

Why why(const std::vector<Script>& ranks, const fsdp::report::LinesOf& lines_of = {}, std::int64_t moving = -1) {
  std::vector<RankEvents> left;
  for (const auto& rank : ranks) {
    left.push_back(rank.left());
    left.back().moves = rank.left().writer.rank == moving;
  }
  return fsdp::report::explain(fsdp::report::ranks_of(left), lines_of);
}

void expect(const Why& why, Cause cause, std::int64_t rank, const std::vector<std::string>& parts) {
  EXPECT_EQ(why.cause, cause) << why.text;
  EXPECT_EQ(why.rank, rank) << why.text;
  for (const auto& part : parts) EXPECT_NE(why.text.find(part), std::string::npos) << part << "\nis not in\n" << why.text;
}

/// All but rank 1 wait in the third collective.
std::vector<Script> waiting_for_rank_1(std::int64_t world_size = 4) {
  auto ranks = run_of(world_size);
  for (auto& rank : ranks) {
    if (rank.left().writer.rank != 1) rank.post(3, "blocks.3").wait(3);
  }
  return ranks;
}

TEST(Why, ARankThatHasNotArrivedIsNamedWithItsPlace) {
  const auto lines = [](std::int64_t rank) {
    EXPECT_EQ(rank, 1);
    return std::vector<std::string>{"File \"/home/me/train.py\", line 7 in step",
                                    "File \"/usr/lib/python3.11/threading.py\", line 1 in wait"};
  };
  expect(why(waiting_for_rank_1(), lines), Cause::kNotArrived, 1,
         {"Rank 1 has not arrived. Ranks 0, 2 and 3 have waited ",
          " s in the all-gather of 'blocks.3', which rank 1 has not called. It is in forward of 'blocks.2', for ",
          "It is at File \"/home/me/train.py\", line 7 in step, in File \"/usr/lib/python3.11/threading.py\", line 1 in wait.",
          "The last collective that all of them have called is the all-gather of 'blocks.2'."});
}

TEST(Why, TheUnitOfTheBackwardIsNamed) {
  auto ranks = waiting_for_rank_1();
  ranks[1].enter("(root)", true);
  expect(why(ranks), Cause::kNotArrived, 1, {"It is in backward of the root unit, for "});
}

TEST(Why, ARankThatMovesIsSlow) {
  expect(why(waiting_for_rank_1(), {}, 1), Cause::kSlow, 1, {"Rank 1 is slow: it moves on, and the others wait for it."});
}

TEST(Why, ARankBetweenStepsMayBeInTheDataLoader) {
  auto ranks = waiting_for_rank_1();
  ranks[1].between_steps();
  expect(why(ranks), Cause::kNotArrived, 1, {"It is between steps (the optimizer, loading data, saving), for "});
  const auto lines = [](std::int64_t) {
    return std::vector<std::string>{"File \"/me/train.py\", line 3 in main",
                                    "File \"/x/site-packages/torch/utils/data/dataloader.py\", line 701 in __next__"};
  };
  expect(why(ranks, lines), Cause::kDataLoader, 1, {"Rank 1 is in the data loader", "/me/train.py\", line 3 in main, in "});
}

TEST(Why, AStoppedRankIsNamedAlsoWhereItHasCalled) {
  auto ranks = waiting_for_rank_1();
  ranks[1].process(ProcessState::kStopped);
  expect(why(ranks), Cause::kStopped, 1,
         {"Rank 1 is stopped (SIGSTOP, Ctrl-Z): `kill -CONT 1001` on host", "which rank 1 has not called."});
  ranks[1].post(3, "blocks.3").wait(3);
  expect(why(ranks), Cause::kStopped, 1, {"Ranks 0, 2 and 3 have waited", "which rank 1 has called, but not completed."});
  ranks[1].process(ProcessState::kDebugged);
  expect(why(ranks), Cause::kDebugged, 1, {"Rank 1 is held by a debugger."});
}

TEST(Why, ADeadRankIsNamedWhetherTheOthersWaitOrHaveFailed) {
  auto ranks = waiting_for_rank_1();
  ranks[1].process(ProcessState::kDead);
  expect(why(ranks), Cause::kDead, 1,
         {"Rank 1 is dead: its process (1001 on host) has ended without reporting a reason", "It was in forward of 'blocks.2', ", " s ago.",
          "Rank 0 waits in the all-gather of 'blocks.3'.", "the all-gather of 'blocks.2'."});
  for (auto& rank : ranks) {
    if (rank.left().writer.rank != 1) rank.fail(3, "Connection closed by peer").end(EndKind::kException, "x").process(ProcessState::kDead);
  }
  expect(why(ranks), Cause::kDead, 1, {"Rank 0 has failed therefore in the all-gather of 'blocks.3'."});
}

TEST(Why, WhenAllHaveBeenKilledTheReasonBeforeThatCounts) {
  auto ranks = waiting_for_rank_1();
  for (auto& rank : ranks) rank.process(ProcessState::kDead);
  expect(why(ranks), Cause::kNotArrived, 1, {"It was in forward of 'blocks.2'", "Its process has ended since."});
  for (auto& rank : ranks) rank.end(EndKind::kSignal);
  expect(why(ranks), Cause::kNotArrived, 1, {});
  // A launcher has ended the others after one was killed.
  auto others = run_of(3);
  for (auto& rank : others) rank.process(ProcessState::kDead);
  others[0].end(EndKind::kSignal);
  others[2].end(EndKind::kSignal);
  expect(why(others), Cause::kDead, 1, {});
}

TEST(Why, ARankThatHasEndedTooEarlyIsNamed) {
  auto ranks = waiting_for_rank_1();
  ranks[1].end(EndKind::kReturned).process(ProcessState::kDead);
  expect(why(ranks), Cause::kDead, 1, {"Rank 1 has ended its program, which is too early"});
  ranks[1].process(ProcessState::kElsewhere);
  expect(why(ranks), Cause::kDead, 1, {"Rank 1 has ended its program, which is too early"});
  auto asked = waiting_for_rank_1();
  asked[1].end(EndKind::kSignal).process(ProcessState::kDead);
  expect(why(asked), Cause::kDead, 1, {"Rank 1 has ended its program, as SIGTERM or Ctrl-C has asked it to"});
}

TEST(Why, RanksThatAreKilledAfterAFailureAreNotItsCause) {
  auto ranks = waiting_for_rank_1();
  ranks[1].end(EndKind::kException, "ValueError: bad");
  for (auto& rank : ranks) {
    rank.process(ProcessState::kDead);
    if (rank.left().writer.rank != 1) rank.left().alive = rank.left().events.back().time + 100 * kMs;
  }
  expect(why(ranks), Cause::kFailed, 1, {"Rank 1 has failed first, when it was in forward of 'blocks.2': ValueError: bad"});
}

// Its model goes, and with it the connections, before the code is known.
TEST(Why, ARankThatReturnsACodeHasFailed) {
  auto ranks = waiting_for_rank_1();
  for (auto& rank : ranks) {
    if (rank.left().writer.rank != 1) rank.fail(3, "Connection closed by peer");
  }
  ranks[1].after(1000).end(EndKind::kException, "its function returned 3").process(ProcessState::kDead);
  expect(why(ranks), Cause::kFailed, 1, {"Rank 1 has failed: its function returned 3. Rank 0 waited in the all-gather of 'blocks.3'"});
}

TEST(Why, WaitsEndWithTheLastSignOfLife) {
  auto ranks = waiting_for_rank_1();
  for (auto& rank : ranks) {
    rank.process(ProcessState::kDead);
    if (rank.left().writer.rank != 1) rank.left().alive = rank.left().events.back().time + 38'500 * kMs;
  }
  expect(why(ranks), Cause::kNotArrived, 1,
         {"Ranks 0, 2 and 3 have waited 38.5 s in the all-gather of 'blocks.3'", "It was in forward of 'blocks.2', for 38.5 s."});
}

TEST(Why, TheRankThatMakesAnotherCallIsNamed) {
  auto ranks = run_of(4);
  for (auto& rank : ranks) rank.post(3, rank.left().writer.rank == 2 ? "blocks.4" : "blocks.3").wait(3).fail(3, "they differ");
  expect(
      why(ranks), Cause::kOtherCall, 2,
      {"Rank 2 is in another call than the others: rank 2 has called the all-gather of 'blocks.4', and ranks 0, 1 and 3 have called "
       "the all-gather of 'blocks.3'.",
       "The last collective that all of them have called is the all-gather of 'blocks.2'.", "Rank 2 was last in forward of 'blocks.2'."});
}

TEST(Why, OfTwoRanksBothAreNamed) {
  auto ranks = run_of(2);
  ranks[0].post(3, "blocks.3");
  ranks[1].post(3, "blocks.3", 64, "reduce-scatter");
  expect(why(ranks), Cause::kOtherCall, -1,
         {"The ranks make different calls: rank 1 has called the reduce-scatter of 'blocks.3', and rank 0 has called the all-gather"});
}

TEST(Why, OtherSizesAreAnotherCall) {
  auto ranks = run_of(3);
  for (auto& rank : ranks) rank.post(3, "blocks.3", rank.left().writer.rank == 0 ? 32 : 64);
  expect(why(ranks), Cause::kOtherCall, 0,
         {"rank 0 has called the all-gather of 'blocks.3' of 32 bytes, and ranks 1 and 2", "of 64 bytes."});
}

TEST(Why, WithoutTheFileOfTheOddOneItsPeersTell) {
  auto ranks = run_of(3);
  const std::string text = "the ranks make different calls: rank 1: X; rank 2: Y";
  ranks.erase(ranks.begin() + 1);
  for (auto& rank : ranks) rank.post(3, "blocks.3").wait(3).fail(3, text);
  expect(why(ranks), Cause::kOtherCall, -1, {text, "There is no file of rank 1."});
}

TEST(Why, TheFirstFailureIsToldInItsWords) {
  auto ranks = waiting_for_rank_1();
  ranks[1].end(EndKind::kException, "OSError: no space (File \"train.py\", line 3, in save)").process(ProcessState::kDead);
  ranks[0].after(100).fail(3, "Connection closed by peer");
  expect(why(ranks), Cause::kFailed, 1, {"Rank 1 has failed first, when it was in forward of 'blocks.2': OSError: no space"});
}

TEST(Why, ATimeOutIsTheFaultOfWhoDidNotCome) {
  auto ranks = waiting_for_rank_1();
  for (auto& rank : ranks) {
    if (rank.left().writer.rank != 1) rank.after(30'000).fail(3, "Timed out waiting 30000ms").process(ProcessState::kDead);
  }
  ranks[1].after(40'000).post(3, "blocks.3").wait(3).fail(3, "Connection closed by peer").process(ProcessState::kDead);
  expect(why(ranks), Cause::kNotArrived, 1, {"Rank 0 has given up: Timed out waiting 30000ms"});
}

TEST(Why, AFailureFromWhichItWentOnIsForgotten) {
  auto ranks = run_of(2);
  ranks[0].fail(3, "once");
  ranks[0].left().events.push_back({.time = 2'000'000 * kMs, .source = 1, .kind = EventKind::kStepBegan});
  expect(why(ranks), Cause::kNothing, -1, {"No rank waits for another one, and none has failed."});
}

TEST(Why, WhoWaitsInAnotherRowIsNotTheCause) {
  auto ranks = run_of(4);
  // 0 waits for 1, which waits for 3.
  ranks[0].in_row("inner 0 1 #1").post(1, "a").wait(1);
  ranks[1].in_row("outer 1 3 #1").post(1, "b").wait(1);
  ranks[2].in_row("outer 0 2 #1").post(1, "b").wait(1).done(1);
  expect(why(ranks), Cause::kNotArrived, 3, {"Rank 3 has not arrived. Rank 1 has waited ", " s in the all-gather of 'b'"});
}

TEST(Why, RanksThatWaitForEachOtherAreNamed) {
  auto ranks = run_of(2);
  ranks[0].in_row("inner 0 1 #1").in_row("outer 0 1 #1").post(1, "a").wait(1);
  ranks[1].in_row("outer 0 1 #1").in_row("inner 0 1 #1").post(1, "b").wait(1);
  expect(why(ranks), Cause::kEachOther, -1,
         {"The ranks wait for each other: rank 1 in the all-gather of 'b' of 'inner 0 1', which rank 0 has not called, and rank 0 in the "
          "all-gather of 'a' of 'outer 0 1'."});
}

TEST(Why, ALinkIsNamedWhereAllHaveCalled) {
  auto ranks = waiting_for_rank_1(2);
  ranks[1].post(3, "blocks.3").wait(3);
  expect(why(ranks), Cause::kLink, -1,
         {"The link is slow or cut: all ranks of 'dp_shard' have called the all-gather of 'blocks.3', and ranks 0 and 1 have waited "});
  expect(why(ranks, {}, 0), Cause::kNothing, -1, {});  // It was looked at between two events.
  ranks[1].left().writer.host = {'o', 't', 'h', 'e', 'r'};
  expect(why(ranks), Cause::kLink, -1, {"On host: rank 0.", "On other: rank 1."});
}

TEST(Why, WhoHasCalledAndNeverWaitedMayHoldOthersUp) {
  auto ranks = waiting_for_rank_1();
  ranks[1].post(3, "blocks.3");
  expect(why(ranks), Cause::kNotArrived, 1, {"which rank 1 has called, but not completed."});
}

TEST(Why, AFileThatIsMissingIsNamed) {
  auto ranks = waiting_for_rank_1();
  ranks.erase(ranks.begin() + 1);
  expect(why(ranks), Cause::kNoFile, 1,
         {"Ranks 0, 2 and 3 wait in the all-gather of 'blocks.3'", "There is no file of rank 1: it is the one that the others wait for."});
  ranks.pop_back();
  expect(why(ranks), Cause::kNoFile, -1, {"There is no file of ranks 1 and 3: it is one of these"});
  auto others = waiting_for_rank_1();
  others.erase(others.begin());
  expect(why(others), Cause::kNotArrived, 1, {"Ranks 2 and 3 have waited", "There is no file of rank 0."});
}

TEST(EventFiles, ThoseOfAnEarlierRunAreLeftOut) {
  using fsdp::report::drop_earlier_runs;
  std::vector<RankEvents> ranks;
  for (auto& rank : run_of(3)) ranks.push_back(rank.left());
  EXPECT_EQ(drop_earlier_runs(ranks), std::vector<std::int64_t>());
  ranks.push_back(Script(3, 4).left());  // of the same time, but of a run of four
  ranks[0].writer.made += 1;
  EXPECT_EQ(drop_earlier_runs(ranks), std::vector<std::int64_t>{3});
  ranks[2].writer.made += 1'000'000 * kMs;
  for (auto& event : ranks[2].events) event.time += 1'000'000 * kMs;
  EXPECT_EQ(drop_earlier_runs(ranks), (std::vector<std::int64_t>{0, 1}));
  EXPECT_EQ(ranks.size(), 1U);
}

TEST(Why, WithoutFilesThereIsNoAnswer) { EXPECT_THROW(why({}), fsdp::Error); }

/// A process that keeps its events in a file and then waits.
class Child {
 public:
  explicit Child(const std::filesystem::path& folder, std::int64_t rank = 0) : process_(fork()) {
    if (process_ != 0) return;
    fsdp::events::keep_in_file(folder, rank, 1);
    for (;;) pause();
  }
  ~Child() {
    kill(process_, SIGKILL);
    waitpid(process_, nullptr, 0);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  void send(int signal) const {
    kill(process_, signal);
    int status = 0;
    if (signal == SIGSTOP) waitpid(process_, &status, WUNTRACED);
  }

 private:
  const pid_t process_;
};

RankEvents read_when_there(const std::filesystem::path& file) {
  for (;;) {
    try {
      return fsdp::report::read_events(file);
    } catch (const fsdp::Error&) {
      usleep(1000);
    }
  }
}

TEST(EventFiles, TellHowTheirProcessesAre) {
  const fsdp::testing::TemporaryFolder folder;
  const auto file = folder.path() / "rank-0.events";
  {
    const Child child(folder.path());
    EXPECT_EQ(read_when_there(file).process, ProcessState::kRunning);
    child.send(SIGSTOP);
    EXPECT_EQ(fsdp::report::read_events(file).process, ProcessState::kStopped);
    EXPECT_TRUE(fsdp::report::lines_of_program(fsdp::report::read_events(file).writer).empty());
  }
  EXPECT_EQ(fsdp::report::read_events(file).process, ProcessState::kDead);
}

TEST(EventFiles, AnotherProcessOfThatNumberIsNotTheRank) {
  const fsdp::testing::TemporaryFolder folder;
  const Child child(folder.path());
  read_when_there(folder.path() / "rank-0.events");
  const auto copy = folder.path() / "copy";
  std::filesystem::copy_file(folder.path() / "rank-0.events", copy);
  EXPECT_EQ(fsdp::report::read_events(copy).process, ProcessState::kRunning);
  constexpr int kProcessBegan = 40;  // bytes
  std::fstream(copy, std::ios::in | std::ios::out | std::ios::binary).seekp(kProcessBegan).put(1).put(1);
  EXPECT_EQ(fsdp::report::read_events(copy).process, ProcessState::kDead);
}

TEST(EventFiles, OthersAreListed) {
  const fsdp::testing::TemporaryFolder folder;
  const Child child(folder.path());
  read_when_there(folder.path() / "rank-0.events");
  folder.write("rank-1.events", "something else");
  folder.write("notes.txt", "something else");
  const auto run = fsdp::report::read_run(folder.path());
  ASSERT_EQ(run.ranks.size(), 1U);
  EXPECT_EQ(run.ranks[0].writer.rank, 0);
  ASSERT_EQ(run.left_out.size(), 1U);
  EXPECT_NE(run.left_out[0].find("rank-1.events: no file of events"), std::string::npos) << run.left_out[0];
  EXPECT_THROW(fsdp::report::read_run(folder.path() / "missing"), fsdp::Error);
}

}  // namespace why_test
