#include "checkpoint/commit.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/checksum.h"
#include "checkpoint/steps.h"
#include "fsdp/error.h"
#include "support/faulty_files.h"
#include "support/messages.h"
#include "support/python_peer.h"
#include "support/small_step.h"

namespace fsdp::ckpt {
namespace commit_test {

namespace fs = std::filesystem;
using fsdp::testing::content_of_step;
using fsdp::testing::FaultyFiles;
using fsdp::testing::message_of;
using fsdp::testing::read_file;
using fsdp::testing::save_step;
using fsdp::testing::TemporaryFolder;

TEST(Commit, AStepIsThereAndNothingElse) {
  const TemporaryFolder folder;
  const fs::path steps = folder.path() / "deep/er";
  EXPECT_EQ(latest_step(steps), std::nullopt);
  save_step(steps / "100", "abc");
  EXPECT_EQ(list_folder(steps), std::vector<std::string>{"100"});
  EXPECT_EQ(list_folder(steps / "100"), (std::vector<std::string>{".fsdp-checksums", ".fsdp-owner", ".metadata", "__0_0.distcp"}));
  EXPECT_EQ(latest_step(steps), steps / "100");
  EXPECT_EQ(content_of_step(steps / "100"), "abc");
  save_step(steps / "100/", "other");
  EXPECT_EQ(list_folder(steps), std::vector<std::string>{"100"});
  EXPECT_EQ(content_of_step(steps / "100"), "other");
}

TEST(Commit, OnlyCheckpointsAreOverwritten) {
  const TemporaryFolder folder;
  folder.write("home/thesis.tex", "x");
  folder.write("file", "x");
  folder.write("python/.metadata", "x");
  fs::create_directory(folder.path() / "empty");
  for (const char* name : {"home", "file"}) {
    const fs::path target = folder.path() / name;
    EXPECT_NE(message_of([&] { save_step(target, "new"); }).find(target.string() + " is there and is no checkpoint"), std::string::npos);
  }
  EXPECT_EQ(list_folder(folder.path()), (std::vector<std::string>{"empty", "file", "home", "python"}));
  for (const char* name : {"python", "empty"}) {
    save_step(folder.path() / name, "new");
    EXPECT_EQ(content_of_step(folder.path() / name), "new");
  }
  // Where something came while the step was written.
  const TemporaryStep lease = begin_step(folder.path() / "late");
  const fs::path& temporary = lease.path();
  folder.write("late/thesis.tex", "x");
  EXPECT_THROW(commit_step(temporary, folder.path() / "late"), Error);
  EXPECT_EQ(read_file(folder.path() / "late/thesis.tex"), "x");
}

TEST(Commit, WhatIsNewReplacesNothing) {
  const TemporaryFolder folder;
  save_step(folder.path() / "1", "precious");
  fs::create_directory(folder.path() / "empty");
  folder.write("file", "x");
  const std::string refusal = " is there already, and what is written here replaces nothing";
  for (const char* name : {"1", "1/", "file"}) {
    EXPECT_NE(message_of([&] { begin_new(folder.path() / name); }).find(refusal), std::string::npos) << name;
  }
  EXPECT_EQ(content_of_step(folder.path() / "1"), "precious");
  for (const char* name : {"empty", "new"}) {
    const TemporaryStep step = begin_new(folder.path() / name);
    write_whole(step.path() / "model", "x");
    commit_new(step.path(), folder.path() / name);
    EXPECT_EQ(list_folder(folder.path() / name), std::vector<std::string>{"model"});
  }
  // Where something came while it was written.
  const TemporaryStep late = begin_new(folder.path() / "late");
  folder.write("late/thesis.tex", "x");
  EXPECT_NE(message_of([&] { commit_new(late.path(), folder.path() / "late"); }).find(refusal), std::string::npos);
  EXPECT_EQ(read_file(folder.path() / "late/thesis.tex"), "x");
}

TEST(Commit, LinksAreFollowed) {
  const TemporaryFolder folder;
  fs::create_directory(folder.path() / "disk");
  save_step(folder.path() / "disk/step-1", "old");
  fs::create_symlink("disk/step-1", folder.path() / "newest");
  fs::create_symlink("disk/step-2", folder.path() / "next");
  fs::create_symlink("disk/export", folder.path() / "export");
  save_step(folder.path() / "newest", "new");
  save_step(folder.path() / "next/", "two");
  const TemporaryStep step = begin_new(folder.path() / "export");
  commit_new(step.path(), folder.path() / "export");
  EXPECT_EQ(content_of_step(folder.path() / "disk/step-1"), "new");
  EXPECT_EQ(content_of_step(folder.path() / "disk/step-2"), "two");
  EXPECT_EQ(list_folder(folder.path() / "disk"), (std::vector<std::string>{"export", "step-1", "step-2"}));
  for (const char* name : {"newest", "next", "export"}) EXPECT_TRUE(fs::is_symlink(folder.path() / name)) << name;
}

// Of 4,096 files with 25 GB each: 100 TB. Who reads one of them reads the head and this one's checksums.
TEST(Commit, ASidecarListsAHundredTerabytes) {
  constexpr int kFiles = 4096;
  constexpr std::int64_t kSize = std::int64_t{25000} << 20;
  const TemporaryFolder folder;
  ListedFile one{.name = "one", .size = 3 * kSummedBlock, .crc32 = {1, 2, 3}};
  std::vector<ListedFile> listed(kFiles, ListedFile{.name = "", .size = kSummedBlock, .crc32 = {7}});
  for (int i = 0; i < kFiles; ++i) listed[static_cast<std::size_t>(i)].name = "__" + std::to_string(i) + "_0.distcp";
  listed.push_back(one);
  seal_step(folder.path(), listed);
  const Sidecar sidecar = read_sidecar(folder.path());
  ASSERT_EQ(sidecar.files.size(), listed.size());
  EXPECT_EQ(read_sums(folder.path(), sidecar.files.back()), one);
  // The same head with other sizes, and the sidecar as long as they make it, of which nobody reads more than the head.
  std::string lines = "saved 1\n";
  for (int i = 0; i < kFiles; ++i) lines += std::to_string(kSize) + " __" + std::to_string(i) + "_0.distcp 00000000\n";
  char first[64];
  std::snprintf(first, sizeof(first), "fsdp-checksums 3 %012zu\n", 30 + lines.size() + 13);
  std::string head = first + lines;
  std::snprintf(first, sizeof(first), "end %08x\n", crc32(0, head));
  head += first;
  std::int64_t reached = 0;
  const ReadAt read = [&](std::int64_t offset, std::span<char> to) {
    reached = std::max(reached, offset + static_cast<std::int64_t>(to.size()));
    std::copy_n(head.begin() + offset, to.size(), to.begin());
  };
  const std::int64_t size = static_cast<std::int64_t>(head.size()) + std::int64_t{kFiles} * 25000 * 4;
  EXPECT_EQ(read_sidecar(read, size, "sidecar").files.back().sums_begin, size - 100000);
  EXPECT_EQ(reached, static_cast<std::int64_t>(head.size()));
  EXPECT_THROW(read_sidecar(read, size - 1, "sidecar"), DamageError);
  EXPECT_THROW(read_sidecar(read, size + 1, "sidecar"), DamageError);
}

TEST(Commit, ADamagedChecksumIsNotAFilesFault) {
  const TemporaryFolder folder;
  save_step(folder.path() / "1", "content");
  const fs::path sidecar = folder.path() / "1" / kSidecar;
  fsdp::testing::flip_bit(sidecar, static_cast<std::int64_t>(fs::file_size(sidecar)) - 1, 3);
  const std::string message = message_of([&] { verify_step(folder.path() / "1"); });
  EXPECT_NE(message.find(sidecar.string() + " is damaged: the checksums of .metadata"), std::string::npos) << message;
}

TEST(Commit, LargeFilesAreSummedInBlocks) {
  const TemporaryFolder folder;
  std::string content(3000001, 'x');
  for (std::size_t i = 0; i < content.size(); i += 7) content[i] = static_cast<char>(i);
  save_step(folder.path() / "1", content);
  EXPECT_EQ(content_of_step(folder.path() / "1"), content);
}

TEST(Commit, WhatIsDamagedIsNotTakenForWhole) {
  const TemporaryFolder folder;
  const fs::path step = folder.path() / "2";
  const auto damaged = [&](auto damage) {
    fs::remove_all(step);
    save_step(step, "content");
    EXPECT_TRUE(is_complete(step));
    damage();
    EXPECT_FALSE(is_complete(step));
    EXPECT_EQ(latest_step(folder.path()), folder.path() / "1");
  };
  save_step(folder.path() / "1", "old");
  damaged([&] { fs::remove(step / kSidecar); });
  damaged([&] { fs::remove(step / ".metadata"); });
  damaged([&] { fs::resize_file(step / "__0_0.distcp", 3); });
  damaged([&] { fs::resize_file(step / kSidecar, 30); });
  damaged([&] { fs::resize_file(step / kSidecar, 0); });
  damaged([&] { std::ofstream(step / kSidecar, std::ios::app) << "\n"; });
}

TEST(Commit, VerifyListsAllThatIsWrong) {
  const TemporaryFolder folder;
  const fs::path step = folder.path() / "1";
  const TemporaryStep lease = begin_step(step);
  const fs::path& temporary = lease.path();
  std::vector<ListedFile> listed;
  for (const char* name : {"missing", "short", "flipped", "good"}) {
    SummedFile file(temporary, name);
    file.append(std::string("content"));
    listed.push_back(file.finish());
  }
  seal_step(temporary, listed);
  commit_step(temporary, step);
  verify_step(step);
  for (std::size_t i = 0; i < listed.size(); ++i) EXPECT_EQ(read_sums(step, read_sidecar(step).files.at(i)), listed[i]);
  fs::remove(step / "missing");
  fs::resize_file(step / "short", 3);
  folder.write("1/flipped", "contend");
  const std::string message = message_of([&] { verify_step(step); });
  EXPECT_NE(message.find("cannot open " + (step / "missing").string() + ": No such file or directory"), std::string::npos) << message;
  EXPECT_NE(message.find("short has 3 bytes instead of 7"), std::string::npos) << message;
  EXPECT_NE(message.find("flipped has the checksum"), std::string::npos) << message;
  EXPECT_EQ(message.find("good"), std::string::npos) << message;
}

/// Stands for the end of the process.
struct Killed {};

// The process ends before any one of the calls that change something: the step before is there, or the new one, and whole; and the next
// save succeeds and leaves nothing behind.
TEST(Commit, KilledAnywhere) {
  for (const bool can_exchange : {true, false}) {
    for (const std::string target : {"1", "2"}) {  // overwrites, and adds
      bool finished = false;
      for (int calls = 0; !finished; ++calls) {
        const TemporaryFolder folder;
        save_step(folder.path() / "1", "old");
        FaultyFiles files;
        files.can_exchange = can_exchange;
        int left = calls;
        files.before = [&left](const std::string&, const std::string&) {
          if (left-- == 0) throw Killed();
        };
        finished = true;
        try {
          save_step(folder.path() / target, "new", files);
          prune_steps(folder.path() / target, 1, files);
        } catch (const Killed&) {
          finished = false;
        }
        const std::optional<fs::path> latest = latest_step(folder.path());
        ASSERT_TRUE(latest) << calls;
        const std::string content = content_of_step(*latest);
        ASSERT_TRUE(content == "old" || content == "new") << content;
        if (finished) {
          ASSERT_EQ(content, "new");
        }

        files.before = nullptr;
        save_step(folder.path() / target, "newer", files);
        prune_steps(folder.path() / target, 1, files);
        // What is left of a folder whose owner file had not come yet, or had gone already, is empty.
        for (const std::string& name : list_folder(folder.path())) {
          if (name == target) continue;
          ASSERT_TRUE(name.starts_with(".tmp-")) << name;
          for (const std::string& inside : list_folder(folder.path() / name))
            ASSERT_EQ(fs::file_size(folder.path() / name / inside), 0) << inside;
        }
        ASSERT_TRUE(is_complete(folder.path() / target));
        ASSERT_EQ(content_of_step(folder.path() / target), "newer");
      }
    }
  }
}

TEST(Commit, FaultsLeaveTheOldStepWhole) {
  const auto fails = [](auto set, const std::string& reason) {
    const TemporaryFolder folder;
    save_step(folder.path() / "1", "old");
    FaultyFiles files;
    set(files);
    const std::string message = message_of([&] { save_step(folder.path() / "1", "new", files); });
    EXPECT_NE(message.find(reason), std::string::npos) << message;
    EXPECT_NE(message.find(folder.path().string()), std::string::npos) << message;
    EXPECT_EQ(latest_step(folder.path()), folder.path() / "1");
    EXPECT_EQ(content_of_step(folder.path() / "1"), "old");
  };
  for (int space = 0; space < 60; space += 5) fails([space](FaultyFiles& files) { files.space = space; }, "No space left on device");
  fails([](FaultyFiles& files) { files.pwrite_error = EIO; }, "Input/output error");
  fails([](FaultyFiles& files) { files.fsync_error = EIO; }, "Input/output error");
  fails([](FaultyFiles& files) { files.close_error = EIO; }, "Input/output error");
  fails([](FaultyFiles& files) { files.rename_error = EROFS; }, "Read-only file system");
  for (const bool can_exchange : {true, false}) {
    fails(
        [&](FaultyFiles& files) {
          files.fsync_fails_after_rename = true;
          files.can_exchange = can_exchange;
        },
        "Input/output error");
  }
}

TEST(Commit, ShortWritesAndSlowSyncsAreNoFaults) {
  const TemporaryFolder folder;
  FaultyFiles files;
  files.most_at_once = 2;
  files.interrupts = true;
  files.fsync_time = std::chrono::milliseconds(5);
  save_step(folder.path() / "1", "old", files);
  save_step(folder.path() / "1", "new", files);
  EXPECT_EQ(content_of_step(folder.path() / "1"), "new");
}

}  // namespace commit_test
}  // namespace fsdp::ckpt
