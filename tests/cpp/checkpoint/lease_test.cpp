#include "checkpoint/lease.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <optional>
#include <string>
#include <thread>

#include "support/python_peer.h"

namespace fsdp::ckpt {
namespace lease_test {

namespace fs = std::filesystem;
using std::chrono::minutes;
using std::chrono::system_clock;

class LeaseTest : public ::testing::Test {
 protected:
  const fs::path& path() const { return folder_.path(); }
  std::string text() const { return fsdp::testing::read_file(path() / kOwnerFile); }
  /// Gives a line of the owner file another value.
  void change(const std::string& key, const std::string& value) const {
    std::string text = this->text();
    const auto begin = text.find("\n" + key + " ") + key.size() + 2;
    text.replace(begin, text.find('\n', begin) - begin, value);
    folder_.write(kOwnerFile, text);
  }
  Owner owner(system_clock::time_point now = system_clock::now()) const { return owner_of(path(), FileSystem::real(), {}, now); }

 private:
  fsdp::testing::TemporaryFolder folder_;
};

TEST_F(LeaseTest, IsHeldAsLongAsItLives) {
  EXPECT_EQ(owner(), Owner::kUnknown);
  {
    std::optional<Lease> lease(path());
    EXPECT_EQ(owner(), Owner::kWriting);
    const Lease moved = *std::move(lease);
    lease.reset();
    EXPECT_EQ(owner(), Owner::kWriting);
  }
  EXPECT_EQ(owner(), Owner::kGone);
}

TEST_F(LeaseTest, EndsWithItsProcess) {
  int is_there[2];
  int may_end[2];
  ASSERT_EQ(pipe(is_there), 0);
  ASSERT_EQ(pipe(may_end), 0);
  const pid_t child = fork();
  if (child == 0) {
    close(may_end[1]);
    const Lease lease(path());
    char byte = 'x';
    _exit(::write(is_there[1], &byte, 1) == 1 && ::read(may_end[0], &byte, 1) == 0 ? 0 : 1);
  }
  char byte = 0;
  ASSERT_EQ(read(is_there[0], &byte, 1), 1);
  EXPECT_EQ(owner(), Owner::kWriting);
  close(may_end[1]);
  siginfo_t info{};
  ASSERT_EQ(waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT), 0);
  EXPECT_EQ(owner(), Owner::kGone) << "nobody has waited for it yet";
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  EXPECT_EQ(owner(), Owner::kGone);
}

TEST_F(LeaseTest, AProcessThatGotTheSameNumberIsAnother) {
  const Lease lease(path());
  change("process", std::to_string(getppid()));
  change("started", "1");  // with the machine; the parent may have begun in the same hundredth of a second as this process
  EXPECT_EQ(owner(), Owner::kGone);
}

TEST_F(LeaseTest, OfAnotherMachineLastsUntilItIsNotRenewed) {
  { const Lease lease(path()); }
  change("machine", "elsewhere");
  EXPECT_EQ(owner(), Owner::kWriting);
  EXPECT_EQ(owner(system_clock::now() + minutes(29)), Owner::kWriting);
  EXPECT_EQ(owner(system_clock::now() + minutes(31)), Owner::kGone);
}

TEST_F(LeaseTest, IsRenewed) {
  const Lease lease(path(), FileSystem::real(), {.renewed = std::chrono::milliseconds(1), .lasts = minutes(30)});
  const std::string before = text();
  const fs::path renamed = path() / "renamed";
  fs::rename(path() / kOwnerFile, renamed);  // As its folder is.
  const auto give_up = system_clock::now() + minutes(1);
  while (fsdp::testing::read_file(renamed) == before && system_clock::now() < give_up) std::this_thread::yield();
  const std::string after = fsdp::testing::read_file(renamed);
  EXPECT_GT(after, before);
  EXPECT_EQ(after.substr(after.find("\nhost")), before.substr(before.find("\nhost")));
}

TEST_F(LeaseTest, WhatIsNoOwnerFileSaysNothing) {
  const Lease lease(path());
  const std::string whole = text();
  for (const std::string& other : {std::string(), std::string("fsdp-owner"), std::string("notes\n") + whole,
                                   whole.substr(0, whole.find("token")), std::string(1 << 20, 'x')}) {
    fs::remove(path() / kOwnerFile);
    std::ofstream(path() / kOwnerFile) << other;
    EXPECT_EQ(owner(), Owner::kUnknown) << other.substr(0, 100);
  }
}

}  // namespace lease_test
}  // namespace fsdp::ckpt
