// Ranks that share memory: what a rank leaves that is killed, or goes first, and who does not share.
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <iterator>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "comm/host_memory/host_memory.h"
#include "comm/launch/launch.h"
#include "comm/mesh/store_mesh.h"
#include "fsdp/device_mesh.h"
#include "support/collective_checks.h"
#include "support/messages.h"
#include "support/multi_rank.h"
#include "support/shared_memory.h"

namespace fsdp::comm {
namespace shared_failures_test {

using testing::Gather;
using testing::has;
using testing::in_heap;
using testing::kGather;
using testing::kReduce;
using testing::leaves_no_trace;
using testing::message_of;
using testing::Reduce;
using testing::run_ranks;
using testing::Scatter;
using testing::shares;
using testing::world;

using SharedFailures = testing::SharedMemoryTest;

std::int64_t now() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

int entries_of(const char* folder) {
  const std::filesystem::directory_iterator entries(folder);
  return static_cast<int>(std::distance(begin(entries), end(entries)));
}

/// This thread and the ranks that it launches see a /dev/shm of their own, as other tests may use it. False where the system refuses that.
bool has_own_dev_shm() {
  return unshare(CLONE_NEWNS) == 0 && mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         mount("none", "/dev/shm", "tmpfs", 0, nullptr) == 0;
}

/// What the test and all of its ranks see.
class SharedNumber {
 public:
  SharedNumber() : page_(mmap(nullptr, sizeof(Number), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) {
    if (page_ == MAP_FAILED) throw std::bad_alloc();
    new (page_) Number(0);
  }
  ~SharedNumber() { munmap(page_, sizeof(Number)); }
  SharedNumber(const SharedNumber&) = delete;
  SharedNumber& operator=(const SharedNumber&) = delete;
  std::atomic<std::int64_t>& operator*() const { return *static_cast<Number*>(page_); }

 private:
  using Number = std::atomic<std::int64_t>;
  void* const page_;
};

/// Collectives of each kind, without end.
[[noreturn]] void communicate(Communicator& communicator, Gather& gather, Reduce& reduce, Scatter& scatter) {
  for (;;) {
    const auto gathering = communicator.all_gather(gather.parts, kGather);
    communicator.reduce_scatter(reduce.parts, 1, kReduce)->wait();
    communicator.exchange(at::ones({3}), {.operation = "norms", .unit = {}});
    communicator.scatter(scatter.parts, 0, testing::kScatter)->wait();
    gathering->wait();
    gather.check();
  }
}

/// One of the ranks is killed so many microseconds after all have met. `longest` becomes what the slowest of the others took, in ns, if it
/// was less.
void expect_that_all_fail(int ranks, int victim, int microseconds, const SharedNumber& longest) {
  const SharedNumber killed;
  const std::string who = "rank " + std::to_string(victim);
  ::testing::internal::CaptureStderr();
  const auto train = [&] {
    alarm(100);
    auto communicator = world();
    const std::int64_t numel = 1'000'003;
    Gather gather(*communicator, {{.numel = numel, .dtype = at::kFloat}}, 1, false);
    Reduce reduce(*communicator, {{.numel = numel / 16, .dtype = at::kFloat}}, 1, 1);
    Scatter scatter(*communicator, {{.numel = 1000, .dtype = at::kFloat}}, 1, 0, false);
    gather.parts[0].full = in_heap(gather.parts[0].full);
    communicator->barrier();
    std::thread death;
    if (communicator->rank() == victim) {
      death = std::thread([&] {
        usleep(static_cast<useconds_t>(microseconds));
        *killed = now();
        kill(getpid(), SIGKILL);
      });
    }
    const std::string message = message_of<CommError>([&] { communicate(*communicator, gather, reduce, scatter); });
    const std::int64_t took = now() - *killed;
    std::int64_t known = *longest;
    while (known < took && !(*longest).compare_exchange_weak(known, took)) {
    }
    if (!has(message, " on rank " + std::to_string(communicator->rank()) + " of ") || !has(message, who + ")"))
      throw Error("message: " + message);
    if (took > 10'000'000'000) throw Error("took " + std::to_string(took) + " ns");  // The mesh's time-out is ten minutes.
    gather.parts.clear();
    communicator.reset();
    if (!leaves_no_trace()) throw Error("a heap is still mapped");
    return 0;
  };
  EXPECT_EQ(launch_ranks(ranks, train, {}), 1);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), who + " was killed by signal 9 (Killed)\n")
      << ranks << " ranks, after " << microseconds << " us";
}

// A hundred times in `make nightly`.
TEST_F(SharedFailures, ARankThatIsKilledFailsAllOthersSoonAndLeavesNothing) {
  const bool sees_own_files_only = has_own_dev_shm();
  const int descriptors = entries_of("/proc/self/fd");
  std::mt19937 random(17);
  const SharedNumber longest;
  for (int kills = std::getenv("FSDP_NIGHTLY") != nullptr ? 100 : 10; kills > 0; --kills) {
    const int ranks = std::uniform_int_distribution(2, 4)(random);
    const int victim = std::uniform_int_distribution(0, ranks - 1)(random);
    // As many moments in the first collectives as in the many that follow.
    const double microseconds = std::exp2(std::uniform_real_distribution(4.0, 16.0)(random));
    expect_that_all_fail(ranks, victim, static_cast<int>(microseconds), longest);
    if (::testing::Test::HasFailure()) return;
  }
  std::cout << "the slowest rank knew of a death after " << 1e-6 * static_cast<double>(*longest) << " ms" << std::endl;
  EXPECT_EQ(entries_of("/proc/self/fd"), descriptors);
  if (sees_own_files_only) {
    EXPECT_EQ(entries_of("/dev/shm"), 0);
  }
}

// A child of the dead rank has its sockets, so that no connection closes.
TEST_F(SharedFailures, AForkedChildOfADeadRankKeepsNobodyWaiting) {
  ::testing::internal::CaptureStderr();
  const auto train = [] {
    alarm(60);
    const auto communicator = world();
    pid_t child = 0;
    if (communicator->rank() == 1 && (child = fork()) == 0) {
      alarm(60);
      for (;;) pause();
    }
    const auto children = communicator->exchange(at::full({1}, std::int64_t{child}, at::kLong), {.operation = "children", .unit = {}});
    child = static_cast<pid_t>(children[1].item<std::int64_t>());
    if (communicator->rank() == 1) kill(getpid(), SIGKILL);
    Gather gather(*communicator, {{.numel = 1000, .dtype = at::kFloat}}, 1, false);
    const auto gathering = [&] { communicator->all_gather(gather.parts, kGather)->wait(); };
    const auto meeting = [&] { communicator->barrier(); };
    const bool reads = communicator->rank() == 0;  // The other one waits for a message.
    const std::string message = reads ? message_of<CommError>(gathering) : message_of<CommError>(meeting);
    if (!has(message, "rank 1)") && !has(message, "different calls")) throw Error("message: " + message);
    if (kill(child, 0) != 0) throw Error("the child has gone first");
    usleep(500'000);  // The other one asks, too.
    kill(child, SIGKILL);
    return 0;
  };
  EXPECT_EQ(launch_ranks(2, train, {}), 1);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "rank 1 was killed by signal 9 (Killed)\n");
}

// Rank 3 is through with the scatter, and leaves. Rank 2 compares its call with rank 1's, which comes late.
TEST_F(SharedFailures, WhoLeavesWhenItsPartIsDoneFailsNobody) {
  run_ranks(4, [](int rank) {
    auto communicator = world();
    Scatter scatter(*communicator, {{.numel = 1000, .dtype = at::kFloat}}, 1, 0, false);
    if (rank == 1) usleep(500'000);
    communicator->scatter(scatter.parts, 0, testing::kScatter)->wait();
    scatter.check();
    if (rank == 3) communicator.reset();
    usleep(1'000'000);  // The others stay: their connections do, too.
  });
}

TEST_F(SharedFailures, ThreadsOfOneProcessSendMessages) {
  run_ranks(1, [] {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    const auto train = [&](std::int64_t rank) {
      const auto mesh =
          make_store_mesh({.store = store, .prefix = "threads", .rank = rank, .world_size = 2, .dims = {"dp_shard"}, .rows = {{0, 1}}});
      const auto communicator = mesh.communicator("dp_shard");
      EXPECT_FALSE(shares(*communicator));
      Gather gather(*communicator, {{.numel = 1000, .dtype = at::kFloat}}, 1, false);
      communicator->all_gather(gather.parts, kGather)->wait();
      gather.check();
      communicator->barrier();
    };
    std::thread second(train, 1);
    train(0);
    second.join();
    EXPECT_TRUE(leaves_no_trace());
  });
}

// What is shared along one dimension of a mesh, and what is not, does not matter to the other one.
TEST_F(SharedFailures, EachRowDecidesForItself) {
  run_ranks(4, [](int rank) {
    // Ranks 0 and 1 are a row of dp_shard, and 2 and 3, where one does not want to share.
    const auto mesh = init_device_mesh("cpu", {{"dp_replicate", 2}, {"dp_shard", 2}}, {.shared_memory = rank != 3});
    EXPECT_EQ(shares(*mesh.communicator("dp_shard")), rank < 2);
    EXPECT_EQ(shares(*mesh.communicator("dp_replicate")), rank % 2 == 0);
    for (const char* dim : {"dp_shard", "dp_replicate"}) {
      const auto communicator = mesh.communicator(dim);
      Gather gather(*communicator, {{.numel = 30'000, .dtype = at::kFloat}}, 1, false);
      Reduce reduce(*communicator, {{.numel = 30'000, .dtype = at::kFloat}}, 1, 1);
      const auto gathering = communicator->all_gather(gather.parts, kGather);
      communicator->reduce_scatter(reduce.parts, 1, kReduce)->wait();
      gathering->wait();
      gather.check();
      reduce.check();
    }
  });
}

// A thread of the parent may hold its locks when a child is forked.
TEST_F(SharedFailures, AForkedChildMayDropWhatItHasOfTheHostsMemory) {
  run_ranks(1, [] {
    const auto host_memory = HostMemory::open();
    std::atomic<bool> stop{false};
    std::thread other([&] {
      while (!stop) host_memory->peers();
    });
    for (int i = 0; i < 100; ++i) {
      auto block = host_memory->borrow(100);
      auto mailbox = host_memory->heap().allocate(100);
      const pid_t child = fork();
      if (child == 0) {
        alarm(20);
        host_memory->give_back(std::move(block));
        host_memory->keep_for_late_peers(std::move(mailbox));
        _exit(0);
      }
      int status = -1;
      waitpid(child, &status, 0);
      EXPECT_EQ(status, 0);
      host_memory->give_back(std::move(block));
    }
    stop = true;
    other.join();
  });
}

}  // namespace shared_failures_test
}  // namespace fsdp::comm
