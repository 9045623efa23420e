#include "checkpoint/steps.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/checksum.h"
#include "checkpoint/commit.h"
#include "checkpoint/lease.h"
#include "fsdp/error.h"
#include "support/faulty_files.h"
#include "support/messages.h"
#include "support/python_peer.h"
#include "support/small_step.h"

namespace fsdp::ckpt {
namespace steps_test {

namespace fs = std::filesystem;
using fsdp::testing::content_of_step;
using fsdp::testing::message_of;
using fsdp::testing::save_step;
using fsdp::testing::TemporaryFolder;

using Names = std::vector<std::string>;

Names names(const std::vector<fs::path>& paths) {
  Names result;
  for (const fs::path& path : paths) result.push_back(path.filename());
  return result;
}

TEST(Steps, TheNewestIsWhatWasSavedLast) {
  const TemporaryFolder folder;
  for (const char* name : {"step-10", "final", "99999999999999999999999", "step-9", "best-2"}) save_step(folder.path() / name, name);
  fs::create_directory(folder.path() / "step-11");
  folder.write("step-12", "a file");
  EXPECT_EQ(names(complete_steps(folder.path())), (Names{"step-10", "99999999999999999999999", "step-9", "best-2"}));
  EXPECT_EQ(latest_step(folder.path()), folder.path() / "best-2");
  save_step(folder.path() / "step-10", "again");
  EXPECT_EQ(names(complete_steps(folder.path())), (Names{"99999999999999999999999", "step-9", "best-2", "step-10"}));
}

// As in names of date, time and microseconds.
TEST(Steps, NumbersHaveAnyNumberOfDigits) {
  const auto number = [](std::string_view name) { return step_name(name)->number; };
  EXPECT_EQ(step_name("run-20261128235959123456789")->stem, "run-");
  EXPECT_LT(number("a18446744073709551615"), number("a18446744073709551616"));
  EXPECT_LT(number("a9"), number("b010"));
  EXPECT_EQ(number("a007"), number("7"));
  EXPECT_EQ(number("a000"), StepNumber());
  EXPECT_FALSE(step_name("final"));
  EXPECT_TRUE(number("36893488147419103230").is_multiple_of(10));
  EXPECT_FALSE(number("36893488147419103230").is_multiple_of(7));
  EXPECT_TRUE(number("92233720368547758070").is_multiple_of(9223372036854775807));  // ten times this
  EXPECT_TRUE(number("0").is_multiple_of(3));
  const TemporaryFolder folder;
  for (const char* name : {"20261128235959123457", "20261128235959123456", "20261128235959123458"}) save_step(folder.path() / name, name);
  prune_steps(folder.path() / "20261128235959123458", 2);
  EXPECT_EQ(names(complete_steps(folder.path())), (Names{"20261128235959123456", "20261128235959123458"}));
}

// As by a machine whose clock is a century ahead.
TEST(Steps, ClocksNeedNotAgree) {
  const TemporaryFolder folder;
  const fs::path ahead = folder.path() / "step-5";
  save_step(ahead, "ahead");
  std::string text = fsdp::testing::read_file(ahead / kSidecar);
  const auto saved = std::to_string(read_sidecar(ahead).saved);
  text.replace(text.find(saved), saved.size(), "4102444800000000000");
  const auto end = text.find("end ");
  char sum[9];
  std::snprintf(sum, sizeof(sum), "%08x", crc32(0, std::string_view(text).substr(0, end)));
  text.replace(end + 4, 8, sum);
  folder.write("step-5/" + std::string(kSidecar), text);
  ASSERT_EQ(read_sidecar(ahead).saved, 4102444800000000000);
  save_step(folder.path() / "step-3", "now");
  EXPECT_EQ(names(complete_steps(folder.path())), (Names{"step-5", "step-3"}));
}

TEST(Steps, AnOlderOneIsNotTheNewestBecauseADiskDoesNotAnswer) {
  const TemporaryFolder folder;
  save_step(folder.path() / "step-1", "x");
  save_step(folder.path() / "step-2", "x");
  for (const auto& [code, text] : std::map<int, std::string>{
           {EIO, "Input/output error"}, {ESTALE, "Stale file handle"}, {EMFILE, "Too many open files"}, {EACCES, "Permission denied"}}) {
    // The folder, the step, its sidecar, and each file.
    for (const std::string unseen : {"", "step-2", "step-2/.fsdp-checksums", "step-2/__0_0.distcp"}) {
      fsdp::testing::FaultyFiles files;
      files.look_error = code;
      files.unseen = folder.path().filename().string() + (unseen.empty() ? "" : "/" + unseen);
      const std::string message = message_of([&] { latest_step(folder.path(), files); });
      EXPECT_NE(message.find(text), std::string::npos) << message;
      if (unseen.empty()) continue;
      EXPECT_NE(message_of([&] { prune_steps(folder.path() / "step-1", 1, files); }).find(text), std::string::npos);
      // What belongs to others is no reason to fail.
      save_step(folder.path() / "best-1", "x", files);
      prune_steps(folder.path() / "best-1", 1, files);
    }
  }
  EXPECT_EQ(list_folder(folder.path()), (Names{"best-1", "step-1", "step-2"}));
}

TEST(Steps, TellsWhatIsNotComplete) {
  const TemporaryFolder folder;
  for (const char* name : {"1", "2", "3", "4", "5"}) save_step(folder.path() / name, name);
  fs::resize_file(folder.path() / "2/__0_0.distcp", 0);
  fs::remove(folder.path() / "3/.metadata");
  fs::resize_file(folder.path() / "4" / kSidecar, 30);
  fs::remove(folder.path() / "5" / kSidecar);
  fs::create_directory(folder.path() / "6");
  std::map<std::string, std::pair<Step::State, std::string>> found;
  for (const Step& step : find_steps(folder.path())) found[step.path.filename()] = {step.state, step.fault};
  ASSERT_EQ(found.size(), 5U);
  const auto expect = [&](const char* name, Step::State state, const std::string& fault) {
    EXPECT_EQ(found[name].first, state) << name;
    EXPECT_NE(found[name].second.find(fault), std::string::npos) << found[name].second;
  };
  expect("1", Step::State::kComplete, "");
  expect("2", Step::State::kDamaged, "__0_0.distcp has 0 bytes instead of 1");
  expect("3", Step::State::kDamaged, "/3/.metadata: No such file or directory");
  expect("4", Step::State::kDamaged, ".fsdp-checksums is damaged");
  expect("5", Step::State::kForeign, "");
}

/// Counts how often a sidecar is opened; a file of a step that is looked at may go just then, with its folder.
class WatchedFiles : public FileSystem {
 public:
  std::map<std::string, int> opened;
  fs::path goes;
  bool hidden_ones_go = false;  // when they are listed

  int open(const char* path, int flags, mode_t mode) override {
    if (fs::path(path).filename() == kSidecar) ++opened[fs::path(path).parent_path().filename()];
    return FileSystem::open(path, flags, mode);
  }
  int stat(const char* path, struct stat* status) override {
    if (fs::path(path).parent_path() == goes && fs::path(path).filename() == "__0_0.distcp") fs::remove_all(goes);
    return FileSystem::stat(path, status);
  }
  int list(const char* path, std::vector<std::string>& names) override {
    if (hidden_ones_go && fs::path(path).filename().string().starts_with('.')) fs::remove_all(path);
    return FileSystem::list(path, names);
  }
};

TEST(Steps, ReadsEachSidecarOnce) {
  const TemporaryFolder folder;
  for (const char* name : {"1", "2", "3"}) save_step(folder.path() / name, name);
  fs::resize_file(folder.path() / "2/__0_0.distcp", 0);
  fs::resize_file(folder.path() / "3" / kSidecar, 30);
  WatchedFiles files;
  EXPECT_EQ(find_steps(folder.path(), {}, files).size(), 3U);
  EXPECT_EQ(files.opened, (std::map<std::string, int>{{"1", 1}, {"2", 1}, {"3", 1}}));
}

// By another process, between its sidecar and its files.
TEST(Steps, WhatGoesMeanwhileIsNone) {
  const TemporaryFolder folder;
  for (const char* name : {"1", "2"}) save_step(folder.path() / name, name);
  WatchedFiles files;
  files.goes = folder.path() / "2";
  const std::vector<Step> steps = find_steps(folder.path(), {}, files);
  ASSERT_EQ(steps.size(), 1U);
  EXPECT_EQ(steps.front().path, folder.path() / "1");
}

TEST(Steps, PruneKeepsTheNewestAndWhatItDoesNotKnow) {
  const TemporaryFolder folder;
  for (const char* name : {"1", "2", "3", "10"}) save_step(folder.path() / name, name);
  fs::create_directory(folder.path() / "5");
  begin_step(folder.path() / "11");
  folder.write("notes.txt", "x");
  EXPECT_NE(message_of([&] { prune_steps(folder.path() / "10", 0); }).find("give 1 or more"), std::string::npos);
  prune_steps(folder.path() / "10", 2);
  EXPECT_EQ(list_folder(folder.path()), (Names{"10", "3", "5", "notes.txt"}));
}

// They may be all that is left to repair something from.
TEST(Steps, PruneLeavesDamagedOnes) {
  const TemporaryFolder folder;
  for (const char* name : {"1", "2", "3"}) save_step(folder.path() / name, name);
  fs::resize_file(folder.path() / "1/__0_0.distcp", 0);
  prune_steps(folder.path() / "3", 1);
  EXPECT_EQ(list_folder(folder.path()), (Names{"1", "3"}));
}

TEST(Steps, PruneTakesOneSeries) {
  const TemporaryFolder folder;
  for (const char* name : {"best-1", "step-1", "step-2", "7", "final", "step-3"}) save_step(folder.path() / name, name);
  prune_steps(folder.path() / "step-3/", 1);
  EXPECT_EQ(list_folder(folder.path()), (Names{"7", "best-1", "final", "step-3"}));
  prune_steps(folder.path() / "final", 1);
  EXPECT_EQ(list_folder(folder.path()), (Names{"7", "best-1", "final", "step-3"}));
}

TEST(Steps, PruneNeverTakesWhatWasJustSaved) {
  for (const int keep_last : {1, 2, 3}) {
    const TemporaryFolder folder;
    for (const char* name : {"step-3", "step-4", "step-5", "step-6"}) save_step(folder.path() / name, name);
    save_step(folder.path() / "step-4", "after a rollback");
    prune_steps(folder.path() / "step-4", keep_last);
    EXPECT_EQ(latest_step(folder.path()), folder.path() / "step-4");
    EXPECT_EQ(content_of_step(folder.path() / "step-4"), "after a rollback");
    const std::vector<Names> expected = {{"step-4"}, {"step-6", "step-4"}, {"step-5", "step-6", "step-4"}};
    EXPECT_EQ(names(complete_steps(folder.path())), expected[static_cast<std::size_t>(keep_last) - 1]);
    // Even where another process has saved since.
    save_step(folder.path() / "step-9", "later");
    prune_steps(folder.path() / "step-4", 1);
    EXPECT_EQ(names(complete_steps(folder.path())), Names{"step-4"});
  }
}

/// Says that `writer` runs on another machine, which cannot be asked.
void move_elsewhere(const fs::path& writer) {
  std::string text = fsdp::testing::read_file(writer / kOwnerFile);
  text.replace(text.find("machine "), 8, "machine elsewhere-");
  std::ofstream(writer / kOwnerFile) << text;
}

TEST(Steps, PruneTakesHiddenFoldersOfWritersThatAreGone) {
  const TemporaryFolder folder;
  // Of a user; nobody's; one that is being written here; one that is being written elsewhere; a leftover.
  folder.write(".tmp-my-own-notes/chapter-1", "x");
  folder.write(".tmp-step-7-0123abcd/__0_0.distcp", "x");
  folder.write(".old-step-7-0123abcd/__0_0.distcp", "x");
  const TemporaryStep here = begin_step(folder.path() / "export");
  const fs::path elsewhere = begin_step(folder.path() / "step-8").path();
  move_elsewhere(elsewhere);
  const fs::path leftover = begin_step(folder.path() / "step-9").path();
  save_step(folder.path() / "step-1", "x");
  prune_steps(folder.path() / "step-1", 1);
  EXPECT_EQ(list_folder(folder.path()), (Names{".old-step-7-0123abcd", here.path().filename(), ".tmp-my-own-notes", ".tmp-step-7-0123abcd",
                                               elsewhere.filename(), "step-1"}));
  EXPECT_EQ(fsdp::testing::read_file(folder.path() / ".tmp-my-own-notes/chapter-1"), "x");
}

// A program has a file of a step open that is replaced, and of one that is pruned.
TEST(Steps, WhatNfsKeepsDoesNotFailASave) {
  for (const char* held : {"__0_0.distcp", ".fsdp-owner"}) {
    const TemporaryFolder folder;
    save_step(folder.path() / "1", "x");
    save_step(folder.path() / "2", "x");
    fsdp::testing::FaultyFiles files;
    files.held_open = held;
    save_step(folder.path() / "2", "new", files);
    prune_steps(folder.path() / "2", 1, files);
    EXPECT_EQ(names(complete_steps(folder.path())), Names{"2"});
    EXPECT_EQ(content_of_step(folder.path() / "2"), "new");
    prune_steps(folder.path() / "2", 1, files);
    EXPECT_EQ(list_folder(folder.path()).size(), 3U) << "still open";
    files.held_open = "";
    for (const std::string& name : list_folder(folder.path())) {
      if (name.starts_with('.')) fs::remove(folder.path() / name / ".nfs0123");  // as the client does when the program ends
    }
    prune_steps(folder.path() / "2", 1, files);
    // A folder that has lost its owner file is nobody's; it is empty.
    const Names left = list_folder(folder.path());
    EXPECT_EQ(left.size(), std::string(held) == ".fsdp-owner" ? 3U : 1U);
    for (const std::string& name : left) {
      EXPECT_TRUE(!name.starts_with('.') || fs::is_empty(folder.path() / name)) << name;
    }
  }
}

// Of two that prune at once, each finds what the other one has just taken.
TEST(Steps, PruneLeavesToOthersWhatTheyTakeMeanwhile) {
  for (const std::string call : {"rename", "unlink", "rmdir"}) {
    const TemporaryFolder folder;
    for (const char* name : {"1", "2", "3"}) save_step(folder.path() / name, name);
    const fs::path leftover = begin_step(folder.path() / "9").path();
    fsdp::testing::FaultyFiles files;
    int calls = 0;
    files.before = [&](const std::string& name, const std::string&) {
      if (name != call || calls++ > 0) return;
      prune_steps(folder.path() / "3", 1);
    };
    EXPECT_EQ(message_of([&] { prune_steps(folder.path() / "3", 1, files); }), "no error") << call;
    EXPECT_GT(calls, 0);
    EXPECT_EQ(list_folder(folder.path()), Names{"3"}) << call;
  }
  const TemporaryFolder folder;
  for (const char* name : {"1", "2"}) save_step(folder.path() / name, name);
  WatchedFiles files;
  files.hidden_ones_go = true;
  EXPECT_EQ(message_of([&] { prune_steps(folder.path() / "2", 1, files); }), "no error");
  EXPECT_EQ(list_folder(folder.path()), Names{"2"});
}

// At every call that one save makes, the other one prunes.
TEST(Steps, TwoSaversDoNotDisturbEachOther) {
  for (const bool can_exchange : {true, false}) {
    for (const bool is_fault : {false, true}) {  // The first save's last sync fails: it goes back to the step before.
      const TemporaryFolder folder;
      save_step(folder.path() / "best-1", "old");
      save_step(folder.path() / "step-1", "x");
      fsdp::testing::FaultyFiles files;
      files.can_exchange = can_exchange;
      files.fsync_fails_after_rename = is_fault;
      int calls = 0;
      files.before = [&](const std::string&, const std::string&) {
        ++calls;
        prune_steps(folder.path() / "step-1", 1);
      };
      const std::string message = message_of([&] { save_step(folder.path() / "best-1", "new", files); });
      EXPECT_EQ(message == "no error", !is_fault) << message;
      EXPECT_GT(calls, 8);
      EXPECT_EQ(content_of_step(folder.path() / "best-1"), is_fault ? "old" : "new");
    }
  }
}

}  // namespace steps_test
}  // namespace fsdp::ckpt
