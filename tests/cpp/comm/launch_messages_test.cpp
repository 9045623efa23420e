// What launch_local prints: why ranks have failed, said once; and, if it is asked for, whose a line is.

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "checkpoint/files.h"
#include "comm/launch/launch.h"
#include "fsdp/device_mesh.h"
#include "fsdp/error.h"
#include "fsdp/launch.h"
#include "support/messages.h"
#include "support/program.h"
#include "support/python_peer.h"
#include "support/temporary_folder.h"

namespace launch_messages_test {

using fsdp::testing::has;
using ::testing::internal::CaptureStderr;
using ::testing::internal::CaptureStdout;
using ::testing::internal::GetCapturedStderr;
using ::testing::internal::GetCapturedStdout;

int own_rank() { return std::atoi(std::getenv("RANK")); }

std::string errors_of(int nproc, const std::function<int()>& fn) {
  CaptureStderr();
  EXPECT_NE(fsdp::launch_local(nproc, fn), 0);
  return GetCapturedStderr();
}

TEST(LaunchMessages, OfSeveralRanksArePrintedOnce) {
  const auto refused = [](const char* what) -> int { throw fsdp::Error(what); };
  EXPECT_EQ(errors_of(4, [&] { return refused("bad shape"); }), "ranks 0-3 failed: bad shape\n");
  EXPECT_EQ(errors_of(3, [] { return 2; }), "ranks 0-2 failed: exit code 2\n");
  const auto errors = errors_of(5, [&] { return refused(own_rank() == 3 ? "no file" : "bad shape"); });
  EXPECT_TRUE(has(errors, "ranks 0-2 and 4 failed: bad shape\n") && has(errors, "rank 3 failed: no file\n")) << errors;
  EXPECT_EQ(std::count(errors.begin(), errors.end(), '\n'), 2) << errors;
}

/// Ranks that make so many collective calls.
std::string errors_of_uneven(const std::vector<int>& calls) {
  return errors_of(static_cast<int>(calls.size()), [&] {
    const auto mesh = fsdp::init_device_mesh("cpu", {{"dp_shard", -1}});
    for (int i = 0; i < calls[static_cast<std::size_t>(own_rank())]; ++i) mesh.sum(1);
    return 0;
  });
}

TEST(LaunchMessages, ThePeerThatHadEndedIsNamed) {
  const std::string why = " training: the ranks take different numbers of steps, ";
  // As where one rank has fewer batches, and where rank 0 alone saves in the end.
  for (const auto& calls : {std::vector{2, 3}, std::vector{3, 2}}) {
    const auto errors = errors_of_uneven(calls);
    EXPECT_TRUE(has(errors, "rank " + std::to_string(calls[0] < calls[1] ? 0 : 1) + " had ended its" + why)) << errors;
    EXPECT_TRUE(has(errors, "FSDP_DEBUG=1")) << errors;
  }
  const auto errors = errors_of_uneven({2, 3, 2});
  EXPECT_TRUE(has(errors, "ranks 0 and 2 had ended their" + why)) << errors;
}

TEST(LaunchMessages, APeerThatHasFailedHasNotEnded) {
  const auto uneven = [](const std::function<int()>& end) {
    return [end] {
      const auto mesh = fsdp::init_device_mesh("cpu", {{"dp_shard", -1}});
      if (own_rank() == 0) return end();
      mesh.sum(1);
      return 0;
    };
  };
  EXPECT_EQ(errors_of(2, uneven([] { return 3; })), "rank 0 failed: exit code 3\n");
  EXPECT_EQ(errors_of(2, uneven([]() -> int { throw fsdp::Error("bad shape"); })), "rank 0 failed: bad shape\n");
  EXPECT_EQ(errors_of(2, uneven([] { return raise(SIGKILL); })), "rank 0 was killed by signal 9 (Killed)\n");
}

std::vector<std::string> sorted_lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  std::sort(lines.begin(), lines.end());
  return lines;
}

TEST(LaunchMessages, LinesBeginWithTheRank) {
  CaptureStdout();
  CaptureStderr();
  const auto talk = [] {
    std::cout << "one\ntw";
    std::printf("o\n");
    // More than a pipe holds, and than is read at once.
    for (int i = 0; i < 20'000; ++i) std::cout << "0123456789\n";
    std::cerr << "error\n";
    std::cout << "no end of line";
    return 0;
  };
  EXPECT_EQ(fsdp::launch_local(2, talk, {.prefix_output = true}), 0);
  EXPECT_EQ(sorted_lines(GetCapturedStderr()), (std::vector<std::string>{"[0] error", "[1] error"}));
  const auto lines = sorted_lines(GetCapturedStdout());
  std::vector<std::string> expected;
  for (const std::string rank : {"[0] ", "[1] "}) {
    expected.insert(expected.end(), 20'000, rank + "0123456789");
    for (const char* line : {"no end of line", "one", "two"}) expected.push_back(rank + line);
  }
  EXPECT_EQ(lines.size(), expected.size());
  EXPECT_TRUE(lines == expected);

  CaptureStdout();
  EXPECT_EQ(fsdp::launch_local(1,
                               [] {
                                 std::cout << "as it is" << std::endl;
                                 return 0;
                               }),
            0);
  EXPECT_EQ(GetCapturedStdout(), "as it is\n");
}

// As a line is written, and not in the end.
TEST(LaunchMessages, LinesComeAtOnce) {
  int seen[2];
  ASSERT_EQ(pipe(seen), 0);
  const pid_t program = fork();
  if (program == 0) {
    dup2(seen[1], STDOUT_FILENO);
    alarm(30);
    _exit(fsdp::launch_local(1,
                             []() -> int {
                               std::printf("step 1\n");
                               for (;;) pause();
                             },
                             {.prefix_output = true}));
  }
  close(seen[1]);
  char line[64] = {};
  EXPECT_GT(read(seen[0], line, sizeof(line) - 1), 0);
  EXPECT_EQ(std::string(line), "[0] step 1\n");
  kill(program, SIGKILL);
  close(seen[0]);
  waitpid(program, nullptr, 0);
}

/// Runs `body` in a process whose standard streams are closed where the bits of `closed` say so.
int without_streams(int closed, const std::function<int()>& body) {
  const pid_t program = fork();
  if (program == 0) {
    alarm(60);
    for (int stream = 0; stream < 3; ++stream) {
      if ((closed >> stream & 1) != 0) close(stream);
    }
    _exit(body());
  }
  int status = 0;
  waitpid(program, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

// The pipes and sockets of the launch would have the numbers of the streams, which the ranks' pipes replace.
TEST(LaunchMessages, StreamsMayBeClosed) {
  const auto train = [] {
    const auto mesh = fsdp::init_device_mesh("cpu", {{"dp_shard", -1}});
    std::cout << "a line" << std::endl;
    std::cerr << "another" << std::endl;
    return mesh.sum(1) == 2 ? 0 : 1;
  };
  for (int closed = 1; closed < 8; ++closed) {
    for (const bool prefix : {false, true}) {
      EXPECT_EQ(without_streams(closed, [&] { return fsdp::launch_local(2, train, {.prefix_output = prefix}); }), 0) << closed << prefix;
    }
  }
}

TEST(LaunchMessages, FilesAreNoStandardStreams) {
  const fsdp::testing::TemporaryFolder folder;
  const auto write = [&] {
    auto file = fsdp::ckpt::File::create(folder.path() / "file");
    std::printf("printed");
    std::fflush(stdout);
    file.close();
    return 0;
  };
  EXPECT_EQ(without_streams(7, write), 0);
  EXPECT_EQ(fsdp::testing::read_file(folder.path() / "file"), "");
}

}  // namespace launch_messages_test
