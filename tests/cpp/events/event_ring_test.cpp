#include "events/event_ring.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "events/event_file.h"
#include "events/event_memory.h"
#include "events/row_name.h"
#include "support/temporary_folder.h"

namespace event_ring_test {

using fsdp::events::Event;
using fsdp::events::EventKind;
using fsdp::events::EventMemory;
using fsdp::testing::TemporaryFolder;

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

TEST(EventMemory, KeepsTheLastEventsInTheirOrder) {
  const auto ring = std::make_unique<EventMemory>();
  EXPECT_TRUE(ring->read().empty());
  const std::uint64_t written = EventMemory::kEvents + 100;
  const auto before = std::chrono::steady_clock::now().time_since_epoch();
  for (std::uint64_t i = 0; i < written; ++i) ring->write(numbered(i));
  const auto events = ring->read();
  ASSERT_EQ(events.size(), EventMemory::kEvents);
  for (std::size_t i = 0; i < events.size(); ++i) {
    ASSERT_EQ(events[i].number, 100 + i);
    expect_whole(events[i]);
    ASSERT_GE(events[i].time, i == 0 ? std::chrono::nanoseconds(before).count() : events[i - 1].time);
  }
}

TEST(EventMemory, ThreadsWriteAndAnotherReads) {
  const auto ring = std::make_unique<EventMemory>();
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
  EXPECT_EQ(numbers.size(), EventMemory::kEvents);
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

TEST(EventMemory, ATextIsCutOffAndADamagedOneIsEmpty) {
  const auto memory = std::make_unique<EventMemory>();
  const auto name = memory->add_name(std::string(EventMemory::kLongestName + 5, 'x'));
  EXPECT_EQ(memory->text_of(name), std::string(EventMemory::kLongestName, 'x'));
  EXPECT_EQ(memory->add_name(std::string(EventMemory::kLongestName + 9, 'x')), name);
  EXPECT_EQ(memory->text_of(name + 1), "");
}

TEST(RowNames, AreReadAsTheyAreWritten) {
  const std::vector<std::pair<std::vector<std::int64_t>, std::string>> rows = {
      {{3}, "dp_shard 3"},           {{0, 1}, "dp_shard 0 1"},           {{0, 1, 2, 3}, "dp_shard 0-3"},
      {{1, 5, 9}, "dp_shard 1-9:4"}, {{0, 1, 4, 5}, "dp_shard 0 1 4 5"}, {{5, 3, 1}, "dp_shard 5 3 1"},
  };
  for (const auto& [ranks, name] : rows) {
    EXPECT_EQ(fsdp::events::name_of_row("dp_shard", ranks), name);
    EXPECT_EQ(fsdp::events::ranks_of_row(name), ranks);
    EXPECT_EQ(fsdp::events::ranks_of_row(name + " #2"), ranks);
  }
  for (const char* const none : {"", "model", "model #1", "dp_shard x", "dp_shard 3-", "dp_shard 0-9:0", "dp_shard 0-99999999999"}) {
    EXPECT_TRUE(fsdp::events::ranks_of_row(none).empty()) << none;
  }
}

/// Runs `body` in a process of its own, whose memory of events begins empty. Returns how it ended, as waitpid() tells it.
int in_child(const std::function<void()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    body();
    _exit(::testing::Test::HasFailure() ? 1 : 0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  return status;
}

TEST(EventNames, ThousandsFitAndTheRestIsNobodys) {
  // Elsewhere, as other tests of this process need names, too.
  EXPECT_EQ(in_child([] {
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
            }),
            0);
}

std::unique_ptr<EventMemory> read(const std::filesystem::path& path) {
  auto memory = std::make_unique<EventMemory>();
  fsdp::events::read_file(path, *memory);
  return memory;
}

TEST(EventFile, IsThereAfterTheProcessWasKilled) {
  const TemporaryFolder folder;
  const int status = in_child([&] {
    const auto row = fsdp::events::new_source("dp_shard 0-3");
    const auto before = fsdp::events::name_of("event_ring_test.before");
    fsdp::events::record({.number = 1, .source = row, .unit = before, .kind = EventKind::kPosted});
    fsdp::events::keep_in_file(folder.path() / "new", 3, 4);
    const auto after = fsdp::events::name_of("event_ring_test.after");
    EXPECT_EQ(fsdp::events::name_of("event_ring_test.before"), before);
    fsdp::events::record({.number = 2, .source = row, .unit = after, .kind = EventKind::kWaitBegan});
    if (!::testing::Test::HasFailure()) kill(getpid(), SIGKILL);
  });
  ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
  const auto memory = read(folder.path() / "new" / "rank-3.events");
  EXPECT_EQ(memory->writer().rank, 3);
  EXPECT_EQ(memory->writer().world_size, 4);
  EXPECT_GT(memory->writer().process_began, 0);
  const auto events = memory->read();
  ASSERT_EQ(events.size(), 2U);
  EXPECT_EQ(memory->text_of(events[0].unit), "event_ring_test.before");
  EXPECT_EQ(memory->text_of(events[1].unit), "event_ring_test.after");
  const auto sources = memory->sources();
  ASSERT_FALSE(sources.empty());
  EXPECT_EQ(sources.rbegin()->first, events[0].source);
  EXPECT_EQ(sources.rbegin()->second, "dp_shard 0-3 #1");
}

TEST(EventFile, BeyondTheLimitOfSizesIsAnError) {
  const TemporaryFolder folder;
  const int status = in_child([&] {
    const rlimit limit{.rlim_cur = 4096, .rlim_max = 4096};
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
    EXPECT_THROW(fsdp::events::keep_in_file(folder.path(), 0, 1), std::system_error);
    setenv("FSDP_EVENTS", folder.path().c_str(), 1);
    fsdp::events::keep_in_file_if_asked(0, 1);  // The run goes on.
  });
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(EventFile, IsNotThatOfAForkedProcess) {
  const TemporaryFolder folder;
  const int status = in_child([&] {
    fsdp::events::keep_in_file(folder.path(), 0, 2);
    fsdp::events::record({.number = 7, .kind = EventKind::kPosted});
    const auto name = fsdp::events::name_of("event_ring_test.parent");
    EXPECT_EQ(in_child([&] {
                EXPECT_TRUE(fsdp::events::recorded().empty());
                EXPECT_EQ(fsdp::events::text_of(name), "event_ring_test.parent");
                fsdp::events::record({.number = 8, .kind = EventKind::kPosted});
                fsdp::events::keep_in_file(folder.path(), 1, 2);
                fsdp::events::record({.number = 9, .kind = EventKind::kPosted});
              }),
              0);
  });
  ASSERT_EQ(status, 0);
  const auto of_parent = read(folder.path() / "rank-0.events")->read();
  ASSERT_EQ(of_parent.size(), 1U);
  EXPECT_EQ(of_parent[0].number, 7U);
  const auto of_child = read(folder.path() / "rank-1.events")->read();
  ASSERT_EQ(of_child.size(), 2U);
  EXPECT_EQ(of_child[0].number, 8U);
  EXPECT_EQ(of_child[1].number, 9U);
}

TEST(EventFile, TellsHowItsProcessEnds) {
  const TemporaryFolder folder;
  setenv("FSDP_EVENTS", folder.path().c_str(), 1);
  const auto end_of = [&](const std::function<void()>& body) {
    const int status = in_child([&] {
      fsdp::events::keep_in_file_if_asked(0, 1);
      body();
    });
    const auto memory = read(folder.path() / "rank-0.events");
    const auto events = memory->read();
    std::string text = WIFSIGNALED(status) ? "signal " : "";
    for (const auto& event : events) {
      if (event.kind == EventKind::kEnded) text += std::to_string(event.number) + std::string(memory->text_of(event.operation)) + ";";
    }
    return text;
  };
  EXPECT_EQ(end_of([] { std::_Exit(0); }), "");
  EXPECT_EQ(end_of([] { raise(SIGTERM); }), "signal 2;");
  EXPECT_EQ(end_of([] {
              fsdp::events::record_end(fsdp::events::EndKind::kException, "no more");
              fsdp::events::record_end(fsdp::events::EndKind::kReturned);
            }),
            "1no more;");
  // A handler of the program's stays.
  EXPECT_EQ(end_of([] {
              signal(SIGTERM, [](int) {});
              raise(SIGTERM);
            }),
            "");
  unsetenv("FSDP_EVENTS");
}

/// What keep_in_file_if_asked() says where it can't be done; the events go on all the same.
std::string said_of(const std::string& folder) {
  setenv("FSDP_EVENTS", folder.c_str(), 1);
  ::testing::internal::CaptureStderr();
  fsdp::events::keep_in_file_if_asked(5, 8);
  fsdp::events::keep_in_file_if_asked(5, 8);
  fsdp::events::record({.number = 4, .kind = EventKind::kPosted});
  EXPECT_EQ(fsdp::events::recorded().back().number, 4U);
  return ::testing::internal::GetCapturedStderr();
}

TEST(EventFile, AFolderThatCannotBeWrittenIsToldOnce) {
  const TemporaryFolder folder;
  const auto file = folder.write("file", "");
  const int status = in_child([&] {
    const auto said = said_of((file / "below").string());
    EXPECT_EQ(said.find("libfsdp: rank 5 keeps no events in a file, so `fsdp why` will not know of it: FSDP_EVENTS: "), 0U) << said;
    EXPECT_EQ(said.find('\n'), said.size() - 1) << said;
  });
  EXPECT_EQ(status, 0);
}

TEST(EventFile, AFullDiskIsToldOnceAndEndsNothing) {
  const TemporaryFolder folder;
  constexpr int kRefused = 77;
  const int status = in_child([&] {
    if (unshare(CLONE_NEWNS) != 0 || mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        mount("none", folder.path().c_str(), "tmpfs", 0, "size=1m") != 0) {
      _exit(kRefused);
    }
    const auto said = said_of(folder.path().string());
    EXPECT_NE(said.find("no room for " + std::to_string(sizeof(EventMemory)) + " bytes in "), std::string::npos) << said;
    for (std::size_t i = 0; i < 2 * EventMemory::kEvents; ++i) fsdp::events::record({.number = i, .kind = EventKind::kPosted});
    EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
  });
  if (WIFEXITED(status) && WEXITSTATUS(status) == kRefused) GTEST_SKIP() << "this system refuses mount namespaces";
  EXPECT_EQ(status, 0);
}

TEST(EventFile, OthersAreErrors) {
  const TemporaryFolder folder;
  const auto message = [](const std::filesystem::path& path) -> std::string {
    try {
      read(path);
    } catch (const std::runtime_error& error) {
      return error.what();
    }
    return "";
  };
  ASSERT_EQ(in_child([&] { fsdp::events::keep_in_file(folder.path(), 0, 1); }), 0);
  const auto good = folder.path() / "rank-0.events";
  EXPECT_EQ(message(good), "");
  EXPECT_NE(message(folder.path() / "missing").find("No such file"), std::string::npos);
  EXPECT_NE(message(folder.write("foreign", "something else")).find("foreign: no file of events"), std::string::npos);
  EXPECT_NE(message(folder.write("empty", "")).find("no file of events"), std::string::npos);
  const auto copy = [&](const std::string& name) {
    std::filesystem::copy_file(good, folder.path() / name);
    return folder.path() / name;
  };
  const auto shorter = copy("shorter");
  std::filesystem::resize_file(shorter, 300'000);
  EXPECT_NE(message(shorter).find("cut off"), std::string::npos);
  const auto other = copy("other");
  constexpr auto known = fsdp::events::EventWriter::kVersion;
  std::fstream(other, std::ios::in | std::ios::out | std::ios::binary).seekp(8).put(static_cast<char>(known + 1));
  const auto expected = "version " + std::to_string(known + 1) + ", and this program reads version " + std::to_string(known);
  EXPECT_NE(message(other).find(expected), std::string::npos) << message(other);
}

}  // namespace event_ring_test
