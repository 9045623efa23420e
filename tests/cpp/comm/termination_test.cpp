// SIGTERM to a program that launch_local keeps waiting.

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <functional>

#include "fsdp/launch.h"

namespace termination_test {

volatile std::sig_atomic_t asked_to_end = 0;

/// A program of two ranks that gets SIGTERM when both have begun; without `rank`, they do not handle it. Its status, as waitpid gives it.
int status_of(const std::function<int()>& rank) {
  int begun[2];
  if (pipe(begun) != 0) return -1;
  const pid_t program = fork();
  if (program == 0) {
    alarm(60);
    _exit(fsdp::launch_local(2, [&] {
      alarm(30);
      // A forked rank has the handler of the program that waits for it.
      signal(SIGTERM, rank ? [](int) { asked_to_end = 1; } : SIG_DFL);
      if (write(begun[1], "x", 1) != 1) return 1;
      while (asked_to_end == 0) usleep(10'000);
      return rank();
    }));
  }
  close(begun[1]);
  char byte = 0;
  const bool both = read(begun[0], &byte, 1) == 1 && read(begun[0], &byte, 1) == 1;
  usleep(300'000);  // the program itself begins to listen when its ranks have begun
  kill(program, SIGTERM);
  int status = -1;
  waitpid(program, &status, 0);
  close(begun[0]);
  return both ? status : -1;
}

TEST(Termination, IsPassedOnToRanksThatHandleIt) {
  const int saved = status_of([] { return 0; });
  EXPECT_TRUE(WIFEXITED(saved));
  EXPECT_EQ(WEXITSTATUS(saved), 0);
  const int refused = status_of([] { return 7; });
  EXPECT_TRUE(WIFEXITED(refused));
  EXPECT_EQ(WEXITSTATUS(refused), 7);
}

TEST(Termination, EndsTheProgramWhoseRanksEndByIt) {
  const int status = status_of({});
  EXPECT_TRUE(WIFSIGNALED(status));
  EXPECT_EQ(WTERMSIG(status), SIGTERM);
}

}  // namespace termination_test
