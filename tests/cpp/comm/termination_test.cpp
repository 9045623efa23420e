// SIGINT and SIGTERM to a program that launch_local keeps waiting, and to ranks that ask for them.

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <functional>

#include "fsdp/device_mesh.h"
#include "fsdp/launch.h"
#include "fsdp/stop_requested.h"
#include "support/multi_rank.h"

namespace termination_test {

volatile std::sig_atomic_t asked_to_end = 0;

/// A program of two ranks that gets a signal, `times` times, when both have begun; without `rank`, they do not handle it, and with
/// `rank_waits` do not end by it. Its status, as waitpid gives it. Ranks that have ended after a signal are not started again.
int status_of(int number, const std::function<int()>& rank, int times = 1, unsigned between_us = 0, bool rank_waits = false) {
  int begun[2];
  if (pipe(begun) != 0) return -1;
  const pid_t program = fork();
  if (program == 0) {
    alarm(60);
    _exit(fsdp::launch_local(2,
                             [&] {
                               alarm(30);
                               // A forked rank has the handler of the program that waits for it.
                               signal(number, rank ? [](int) { asked_to_end = 1; } : SIG_DFL);
                               if (write(begun[1], "x", 1) != 1) return 1;
                               while (asked_to_end == 0 || rank_waits) usleep(10'000);
                               return rank();
                             },
                             {.max_restarts = 1}));
  }
  close(begun[1]);
  char byte = 0;
  const bool both = read(begun[0], &byte, 1) == 1 && read(begun[0], &byte, 1) == 1;
  usleep(300'000);  // the program itself begins to listen when its ranks have begun
  kill(program, number);
  for (int i = 1; i < times; ++i) {
    usleep(between_us);
    kill(program, number);
  }
  int status = -1;
  waitpid(program, &status, 0);
  close(begun[0]);
  return both ? status : -1;
}

class Termination : public ::testing::TestWithParam<int> {};

TEST_P(Termination, IsPassedOnToRanksThatHandleIt) {
  const int saved = status_of(GetParam(), [] { return 0; });
  EXPECT_TRUE(WIFEXITED(saved));
  EXPECT_EQ(WEXITSTATUS(saved), 0);
  const int refused = status_of(GetParam(), [] { return 7; });
  EXPECT_TRUE(WIFEXITED(refused));
  EXPECT_EQ(WEXITSTATUS(refused), 7);
}

TEST_P(Termination, EndsTheProgramWhoseRanksEndByIt) {
  const int status = status_of(GetParam(), {});
  EXPECT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(WTERMSIG(status), GetParam());
}

INSTANTIATE_TEST_SUITE_P(Signals, Termination, ::testing::Values(SIGINT, SIGTERM));

// A program that hangs would need SIGKILL otherwise.
TEST(Interruption, TheSecondOneEndsRanksThatGoOn) {
  const int status = status_of(
      SIGINT, [] { return 0; }, /*times=*/2, /*between_us=*/2'100'000, /*rank_waits=*/true);
  EXPECT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(WTERMSIG(status), SIGINT);
}

// As timeout(1) and other programs do it that pass on what their group has got already.
TEST(Interruption, OneThatComesTwiceAtOnceIsOne) {
  const int saved = status_of(
      SIGINT,
      [] {
        usleep(500'000);
        return 0;
      },
      /*times=*/2, /*between_us=*/50'000);
  EXPECT_TRUE(WIFEXITED(saved));
  EXPECT_EQ(WEXITSTATUS(saved), 0);
}

TEST(StopRequested, IsTrueOnAllRanksAfterTheSameStep) {
  for (const int number : {SIGINT, SIGTERM}) {
    fsdp::testing::run_ranks(3, [&](int rank) {
      const auto mesh = fsdp::init_device_mesh("cpu", {{"dp_shard", -1}});
      int step = 0;
      do {
        if (++step == 4 && rank == 1) raise(number);
        ASSERT_LT(step, 9);
      } while (!fsdp::stop_requested(mesh));
      EXPECT_EQ(step, 4);
      EXPECT_EQ(mesh.sum(step), 12);
      EXPECT_TRUE(fsdp::stop_requested(mesh));  // It stays so.
    });
  }
}

}  // namespace termination_test
