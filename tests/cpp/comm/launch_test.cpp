#include "comm/launch/launch.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <exception>
#include <functional>
#include <iostream>
#include <stdexcept>
#include <string>
#include <thread>

#include "fsdp/device_mesh.h"
#include "fsdp/error.h"
#include "fsdp/fully_shard.h"
#include "fsdp/launch.h"
#include "support/messages.h"
#include "support/multi_rank.h"
#include "support/program.h"

namespace fsdp {
namespace launch_test {

using testing::has;
using ::testing::internal::CaptureStderr;
using ::testing::internal::GetCapturedStderr;

int own_rank() { return std::atoi(std::getenv("RANK")); }

void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

[[noreturn]] void sleep_forever() {
  alarm(30);  // Should the launcher fail to end it.
  for (;;) pause();
}

struct Outcome {
  int result;
  std::string errors;
};

Outcome launch(int nproc, const std::function<int()>& fn, int grace_ms = 5000) {
  CaptureStderr();
  const int result = comm::launch_ranks(nproc, fn, {.grace = std::chrono::milliseconds(grace_ms)});
  return {result, GetCapturedStderr()};
}

TEST(Launch, RanksSeeTheLaunchersVariables) {
  testing::run_ranks(3, [](int rank) {
    EXPECT_EQ(std::string(std::getenv("RANK")), std::to_string(rank));
    EXPECT_STREQ(std::getenv("WORLD_SIZE"), "3");
    EXPECT_EQ(std::string(std::getenv("LOCAL_RANK")), std::to_string(rank));
    EXPECT_STREQ(std::getenv("LOCAL_WORLD_SIZE"), "3");
    EXPECT_TRUE(is_launched());
  });
}

TEST(Launch, SharesTheCores) {
  if (std::getenv("OMP_NUM_THREADS") != nullptr) GTEST_SKIP() << "OMP_NUM_THREADS is set";
  // More ranks than any machine has cores per rank to give: one thread each.
  testing::run_ranks(64, [] {
    EXPECT_STREQ(std::getenv("OMP_NUM_THREADS"), std::to_string(std::max(1l, sysconf(_SC_NPROCESSORS_ONLN) / 64)).c_str());
    EXPECT_EQ(std::to_string(at::get_num_threads()), std::getenv("OMP_NUM_THREADS"));
  });
}

TEST(Launch, KeepsAnOmpNumThreadsThatIsSet) {
  setenv("OMP_NUM_THREADS", "7", 1);
  testing::run_ranks(2, [] { EXPECT_STREQ(std::getenv("OMP_NUM_THREADS"), "7"); });
  unsetenv("OMP_NUM_THREADS");
}

TEST(Launch, InARankRunsRightHere) {
  testing::run_ranks(2, [](int rank) {
    const pid_t self = getpid();
    EXPECT_EQ(launch_local(4, [&] { return getpid() == self ? 40 + rank : 1; }), 40 + rank);
  });
}

TEST(Launch, InARankOfAnotherLauncherPrintsTheException) {
  const auto fail = []() -> int { throw Error("bad shape"); };
  const auto launched_with = [&](const char* size) {
    return launch(1, [&] {
      setenv("WORLD_SIZE", size, 1);
      return launch_local(2, fail);
    });
  };
  EXPECT_EQ(launched_with("1").errors, "rank 0 failed: bad shape\nrank 0 failed: exit code 1\n");
  EXPECT_EQ(launched_with("many").errors, "this rank failed: bad shape\nrank 0 failed: exit code 1\n");
}

TEST(Launch, StartsAllRanksAgainAfterAFailure) {
  // How often rank 0 has begun; it is killed the first two times.
  void* shared = mmap(nullptr, sizeof(std::atomic<int>), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(shared, MAP_FAILED);
  auto& begun = *new (shared) std::atomic<int>(0);
  const auto run = [&](int max_restarts) {
    begun = 0;
    CaptureStderr();
    const int result = launch_local(2,
                                    [&] {
                                      const auto mesh = init_device_mesh("cpu", {{"dp_shard", -1}});
                                      if (own_rank() == 0 && ++begun < 3) raise(SIGKILL);
                                      mesh.barrier();
                                      return 0;
                                    },
                                    {.max_restarts = max_restarts});
    return Outcome{result, GetCapturedStderr()};
  };
  const std::string killed = "rank 0 was killed by signal 9 (Killed)\n";
  const auto again = [](int number, int of) {
    return "launch_local: all ranks are started again (" + std::to_string(number) + " of " + std::to_string(of) + ")\n";
  };
  const auto enough = run(5);
  EXPECT_EQ(enough.result, 0);
  EXPECT_EQ(enough.errors, killed + again(1, 5) + killed + again(2, 5));
  EXPECT_EQ(begun, 3);
  const auto too_few = run(1);
  EXPECT_EQ(too_few.result, 1);
  EXPECT_EQ(too_few.errors, killed + again(1, 1) + killed);
  EXPECT_EQ(begun, 2);
  EXPECT_EQ(run(-1).errors, "launch_local: max_restarts is -1; give 0 or more\n");
  munmap(shared, sizeof(begun));
}

TEST(Launch, RejectsNoRanks) {
  CaptureStderr();
  EXPECT_EQ(launch_local(0, [] { return 0; }), 1);
  EXPECT_EQ(GetCapturedStderr(), "launch_local: nproc is 0; at least one rank is needed\n");
}

TEST(Launch, ReturnsTheExitCodeOfTheRankThatFailed) {
  const auto [result, errors] = launch(3, [] { return own_rank() == 1 ? 3 : 0; });
  EXPECT_EQ(result, 3);
  EXPECT_EQ(errors, "rank 1 failed: exit code 3\n");
}

TEST(Launch, PrintsTheExceptionOfARank) {
  const auto [result, errors] = launch(2, []() -> int {
    if (own_rank() == 1) throw std::runtime_error("no such file: corpus.txt");
    return 0;
  });
  EXPECT_EQ(result, 1);
  EXPECT_EQ(errors, "rank 1 failed: no such file: corpus.txt\n");
}

TEST(Launch, PrintsTorchErrorsWithoutTheirBacktrace) {
  const auto [result, errors] = launch(1, []() -> int {
    TORCH_CHECK(false, "sizes differ");
    return 0;
  });
  EXPECT_EQ(result, 1);
  EXPECT_EQ(errors, "rank 0 failed: sizes differ\n");
}

TEST(Launch, PrintsLongMessagesWhole) {
  const std::string message(300000, 'x');  // More than a pipe holds.
  const auto [result, errors] = launch(1, [&]() -> int { throw std::runtime_error(message); });
  EXPECT_EQ(errors, "rank 0 failed: " + message + "\n");
}

TEST(Launch, NamesTheSignalThatKilledARank) {
  const auto [result, errors] = launch(3, []() -> int {
    if (own_rank() == 2) raise(SIGKILL);
    return 0;
  });
  EXPECT_EQ(result, 1);
  EXPECT_EQ(errors, "rank 2 was killed by signal 9 (Killed)\n");
}

TEST(Launch, BlamesTheRankThatFailedOfItsOwn) {
  const auto [result, errors] = launch(2, []() -> int {
    if (own_rank() == 0) throw CommError("a peer left");
    sleep_ms(200);
    throw Error("bad shape");
  });
  EXPECT_EQ(result, 1);
  EXPECT_EQ(errors, "rank 1 failed: bad shape\n");
}

TEST(Launch, PrintsPeerFailuresWhereNoRankFailedOfItsOwn) {
  const auto [result, errors] = launch(2, []() -> int { throw CommError("timed out"); });
  EXPECT_EQ(result, 1);
  EXPECT_EQ(errors, "ranks 0 and 1 failed: timed out\n");
}

// What an exit code can't hold is a failure, whatever its low eight bits say.
TEST(Launch, AnExitCodeOutOfRangeIsAFailure) {
  for (const int value : {256, 512, 257, -1, -256}) {
    const auto [result, errors] = launch(2, [&] { return own_rank() == 1 ? value : 0; });
    EXPECT_EQ(result, 1) << value;
    EXPECT_EQ(errors, "rank 1 failed: its function returned " + std::to_string(value) + "; exit codes are 0 to 255\n");
  }
  EXPECT_EQ(launch(1, [] { return 255; }).result, 255);
  // In a rank of another launcher, which sees the exit code of main() alone.
  EXPECT_EQ(launch(1, [] { return launch_local(2, [] { return 256; }) == 1 ? 0 : 2; }).result, 0);
}

TEST(Launch, NamesTheRankThatLeftBeforeItsFunctionReturned) {
  const auto leave = [](const std::function<void()>& how) {
    return launch(3, [&] {
      if (own_rank() == 2) how();
      return 0;
    });
  };
  // Not exit(): the exit handlers of the tests' own process would run in the rank.
  const auto [result, errors] = leave([] { _exit(0); });
  EXPECT_EQ(result, 1);
  EXPECT_EQ(errors, "rank 2 left by exit(0) before its function returned\n");
  const auto with_code = leave([] { _exit(7); });
  EXPECT_EQ(with_code.result, 7);
  EXPECT_EQ(with_code.errors, "rank 2 left by exit(7) before its function returned\n");
}

TEST(LaunchPrograms, DISABLED_RankExits) {
  EXPECT_EQ(launch_local(2,
                         [] {
                           if (own_rank() == 1) std::exit(0);
                           return 0;
                         }),
            0);
}

TEST(Launch, NamesTheRankThatCalledExit) {
  // torch's thread pool outlives an exit() in the middle of a rank: AddressSanitizer would take that for a leak, and change the code.
  setenv("ASAN_OPTIONS", "detect_leaks=0", 1);
  const auto [code, output] = testing::run_program("LaunchPrograms.DISABLED_RankExits");
  unsetenv("ASAN_OPTIONS");
  EXPECT_NE(code, 0);
  EXPECT_TRUE(has(output, "rank 1 left by exit(0) before its function returned\n")) << output;
}

TEST(Launch, BlamesTheRankThatLeftAndNotItsPeers) {
  const auto [result, errors] = launch(2, [] {
    const auto mesh = init_device_mesh("cpu", {{"dp_shard", -1}});
    if (own_rank() == 0) _exit(0);
    mesh.sum(1);
    return 0;
  });
  EXPECT_EQ(result, 1);
  EXPECT_EQ(errors, "rank 0 left by exit(0) before its function returned\n");
}

// A process forked from a rank shares its sockets with it, and has none of the threads that serve them.
TEST(Launch, AForkedChildOfARankCannotUseItsMesh) {
  testing::run_ranks(2, [](int rank) {
    const auto mesh = init_device_mesh("cpu", {{"dp_shard", -1}});
    torch::nn::Linear model(6, 4);
    fully_shard(*model, {.mesh = mesh});
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);
      const auto of_mesh = testing::message_of([&] { mesh.sum(1); });
      const auto of_parameter = testing::message_of([&] { model->weight.sum(); });
      const bool good = has(of_mesh, "DeviceMesh::sum: ") && has(of_mesh, "this process was forked from rank") &&
                        has(of_parameter, "all-gather of the root unit") && has(of_parameter, "this process was forked from rank");
      if (!good) std::cerr << of_mesh << "\n" << of_parameter << std::endl;
      _exit(good ? 0 : 1);
    }
    int status = 0;
    waitpid(child, &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
    // Nothing has happened to the rank itself.
    EXPECT_EQ(mesh.sum(rank), 1);
    EXPECT_EQ(model->weight.sum().dim(), 0);
  });
}

// A program may ignore its children's ends, or collect them itself: nobody can be asked then how a rank ended.
TEST(Launch, ARankWhoseEndSomebodyElseHasCollected) {
  const auto ignore = [] { signal(SIGCHLD, SIG_IGN); };
  const auto collect = [] {
    signal(SIGCHLD, [](int) {
      const int before = errno;
      while (waitpid(-1, nullptr, WNOHANG) > 0) {
      }
      errno = before;
    });
  };
  for (const auto& begin : {std::function<void()>(ignore), std::function<void()>(collect)}) {
    begin();
    alarm(60);  // It would wait for ever.
    const auto good = launch(2, [] { return 0; });
    const auto bad = launch(2, [] { return own_rank() == 1 ? 3 : 0; });
    const auto thrown = launch(2, []() -> int { throw Error("bad shape"); });
    const auto killed = launch(2, [] { return own_rank() == 1 ? raise(SIGKILL) : 0; });
    alarm(0);
    signal(SIGCHLD, SIG_DFL);
    EXPECT_EQ(good.result, 0) << good.errors;
    EXPECT_EQ(bad.result, 3);
    EXPECT_EQ(bad.errors, "rank 1 failed: exit code 3\n");
    EXPECT_EQ(thrown.errors, "ranks 0 and 1 failed: bad shape\n");
    EXPECT_EQ(killed.result, 1);
    // Whoever asks first knows.
    EXPECT_TRUE(killed.errors == "rank 1 ended before its function returned\n" || has(killed.errors, "killed by signal 9"))
        << killed.errors;
  }
}

/// The number that the next file descriptor of this process gets.
int next_descriptor() {
  const int next = dup(STDIN_FILENO);
  close(next);
  return next;
}

// As where there are too many processes, or files: those that were started would wait for the others.
TEST(Launch, ARankThatCannotBeStartedLeavesNothingBehind) {
  const int before = next_descriptor();
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  for (const int room : {0, 2, 4}) {  // no rank, no rank, two ranks
    const rlimit low{.rlim_cur = static_cast<rlim_t>(before + room), .rlim_max = limit.rlim_max};
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
    std::exception_ptr failure;
    try {
      comm::launch_ranks(4, []() -> int { sleep_forever(); }, {});
    } catch (...) {
      failure = std::current_exception();  // To be read when there are descriptors again: a sanitizer that checks the read needs some.
    }
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
    ASSERT_NE(failure, nullptr);
    const auto message = testing::message_of<std::exception>([&] { std::rethrow_exception(failure); });
    EXPECT_TRUE(has(message, "launch_local: ") && has(message, "Too many open files")) << message;
    EXPECT_TRUE(waitpid(-1, nullptr, WNOHANG) == -1 && errno == ECHILD) << "with room for " << room << ", ranks are left";
    EXPECT_EQ(next_descriptor(), before) << "with room for " << room;
  }
}

TEST(Launch, StopsTheOthersAfterTheGracePeriod) {
  const auto start = std::chrono::steady_clock::now();
  const auto [result, errors] = launch(
      3,
      [] {
        if (own_rank() == 1) return 5;
        if (own_rank() == 2) signal(SIGTERM, SIG_IGN);
        sleep_forever();
      },
      200);
  EXPECT_EQ(result, 5);
  EXPECT_TRUE(has(errors, "rank 1 failed: exit code 5\n")) << errors;
  EXPECT_TRUE(has(errors, "rank 0 did not end within 0.2 s after the first failure and was stopped\n")) << errors;
  EXPECT_TRUE(has(errors, "rank 2 did not end within 0.2 s after the first failure and was stopped\n")) << errors;
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
}

// The ranks hold the pipe's only writing ends, so that it closes when the last of them is gone.
TEST(Launch, RanksDieWithTheirParent) {
  int alive[2];
  ASSERT_EQ(pipe(alive), 0);
  const pid_t parent = fork();
  if (parent == 0) {
    close(alive[0]);
    comm::launch_ranks(2,
                       [&]() -> int {
                         if (write(alive[1], "x", 1) != 1) return 1;
                         sleep_forever();
                       },
                       {});
    _exit(0);
  }
  close(alive[1]);
  char byte = 0;
  ASSERT_EQ(read(alive[0], &byte, 1), 1);
  ASSERT_EQ(read(alive[0], &byte, 1), 1);
  kill(parent, SIGKILL);
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(read(alive[0], &byte, 1), 0);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
  waitpid(parent, nullptr, 0);
  close(alive[0]);
}

TEST(LaunchPrograms, DISABLED_ExitHandlers) {
  std::atexit([] { std::cout << "[exit handler]" << std::endl; });
  std::cout << "[buffered]";
  EXPECT_EQ(launch_local(3, [] { return 0; }), 0);
}

TEST(Launch, RanksRunNoExitHandlersAndPrintNothingTwice) {
  const auto [code, output] = testing::run_program("LaunchPrograms.DISABLED_ExitHandlers");
  EXPECT_EQ(code, 0) << output;
  for (const std::string once : {"[exit handler]", "[buffered]"}) {
    EXPECT_TRUE(has(output, once)) << output;
    EXPECT_EQ(output.find(once), output.rfind(once)) << output;
  }
}

// A fork would copy the locks of other threads as they are.
TEST(LaunchPrograms, DISABLED_HasASecondThread) {
  std::atomic<bool> stop = false;
  std::thread second([&] {
    while (!stop) sleep_ms(1);
  });
  EXPECT_EQ(launch_local(2, [] { return 0; }), 1);
  stop = true;
  second.join();
  EXPECT_EQ(launch_local(2, [] { return 0; }), 0);
}

TEST(Launch, RefusesToForkAProgramWithThreads) {
  const auto [code, output] = testing::run_program("LaunchPrograms.DISABLED_HasASecondThread");
  EXPECT_EQ(code, 0) << output;
  EXPECT_TRUE(has(output, "launch_local: this process runs several threads")) << output;
}

TEST(LaunchPrograms, DISABLED_AssertionFailsInARank) {
  testing::run_ranks(2, [](int rank) { EXPECT_EQ(rank, 0) << "only one rank is expected"; });
}

TEST(LaunchPrograms, DISABLED_RankHangs) {
  testing::run_ranks(
      2,
      [](int rank) {
        if (rank == 1) pause();
      },
      std::chrono::seconds(1));
}

TEST(MultiRank, FailedAssertionsOfARankFailTheTest) {
  const auto [code, output] = testing::run_program("LaunchPrograms.DISABLED_AssertionFailsInARank");
  EXPECT_NE(code, 0);
  EXPECT_TRUE(has(output, "only one rank is expected")) << output;
  EXPECT_TRUE(has(output, "in rank 1 of 2")) << output;
  EXPECT_TRUE(has(output, "rank 1 failed: exit code 1\n")) << output;
}

TEST(MultiRank, RanksThatHangAreEnded) {
  const auto [code, output] = testing::run_program("LaunchPrograms.DISABLED_RankHangs");
  EXPECT_NE(code, 0);
  EXPECT_TRUE(has(output, "rank 1 was killed by signal 14 (Alarm clock)\n")) << output;
}

}  // namespace launch_test
}  // namespace fsdp
