#include "checkpoint/memory_folder.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>

#include "checkpoint/digits.h"
#include "support/messages.h"
#include "support/python_peer.h"
#include "support/temporary_folder.h"

namespace fsdp::ckpt {
namespace memory_folder_test {

namespace fs = std::filesystem;

using testing::has;
using testing::message_of;

class MemoryFolders : public ::testing::Test {
 protected:
  fs::path path(const std::string& name) const { return folder.path() / name; }
  /// Leaves a folder with a step behind, whose process has ended, and whose lease was renewed so long ago.
  void leave(const std::string& name, std::chrono::minutes ago) const {
    const pid_t child = fork();
    if (child == 0) {
      const MemoryFolder left(path(name));
      folder.write(path(name) / "step-1" / "part", "data");
      _exit(0);
    }
    waitpid(child, nullptr, 0);
    const auto file = path(name) / kJobFile;
    std::string text = testing::read_file(file);
    const auto then = std::chrono::system_clock::now() - ago;
    const auto stamp = std::chrono::duration_cast<std::chrono::nanoseconds>(then.time_since_epoch()).count();
    const std::string before = "renewed ";
    text.replace(text.find(before) + before.size(), 20, padded(static_cast<std::uint64_t>(stamp), 20));
    std::ofstream(file) << text;
  }

  testing::TemporaryFolder folder;
};

TEST_F(MemoryFolders, OutlivesItsProcessAndIsFoundAgain) {
  leave("run", std::chrono::minutes(60));
  const MemoryFolder again(path("run"));
  EXPECT_TRUE(fs::exists(path("run/step-1/part")));
  again.keep_only({"step-1"});
  EXPECT_TRUE(fs::exists(path("run/step-1/part")));
  again.keep_only({});
  EXPECT_EQ(list_folder(path("run")), std::vector<std::string>{std::string(kJobFile)});
}

TEST_F(MemoryFolders, TheNextStartRemovesWhatNobodyOwns) {
  leave("restarting", std::chrono::minutes(29));
  const MemoryFolder running(path("running"));
  leave("abandoned", std::chrono::minutes(31));
  folder.write("others/step-1/part", "data");  // without a lease of a job
  fs::copy_file(path("abandoned") / kJobFile, path("others/step-1") / kOwnerFile);
  const MemoryFolder next(path("next"));
  EXPECT_EQ(list_folder(folder.path()), (std::vector<std::string>{"next", "others", "restarting", "running"}));
}

TEST_F(MemoryFolders, IsRefusedWhileItIsInUse) {
  {
    const MemoryFolder held(path("run"));
    const auto message = message_of([&] { MemoryFolder again(path("run")); });
    EXPECT_TRUE(has(message, "is in use by process " + std::to_string(getpid()))) << message;
  }
  const MemoryFolder again(path("run"));
}

TEST_F(MemoryFolders, IsRefusedWhereSomethingElseIs) {
  folder.write("mine/notes", "text");
  EXPECT_TRUE(has(message_of([&] { MemoryFolder(path("mine")); }), "contains 'notes' and belongs to no job"));
  EXPECT_TRUE(has(message_of([&] { MemoryFolder(""); }), "is empty"));
  folder.write("lost/.tmp-step-1-00000000/part", "data");  // of a load that was killed
  const MemoryFolder lost(path("lost"));
}

TEST_F(MemoryFolders, ARemovalThatDidNotEndIsCompleted) {
  leave("run", std::chrono::minutes(31));
  fs::remove_all(path("run/step-1"));
  MemoryFolder::remove(path("run"));
  MemoryFolder::remove(path("run"));
  EXPECT_FALSE(fs::exists(path("run")));
}

TEST_F(MemoryFolders, PlacesAreEqualForOneFolderOnly) {
  fs::create_directories(path("a"));
  fs::create_directory_symlink(path("a"), path("link"));
  EXPECT_EQ(place_of(path("a")), place_of(path("link")));
  EXPECT_NE(place_of(path("a")), place_of(path("b")));
  EXPECT_NE(place_of(path("b/x")), place_of(path("c/x")));
  EXPECT_EQ(place_of(path("b/x")), place_of(path("b/x")));
}

}  // namespace memory_folder_test
}  // namespace fsdp::ckpt
