#include "comm/collectives/group_communicator.h"

#include <unistd.h>

#include <array>
#include <bit>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <memory>
#include <string>

#include "comm/launch/launch.h"
#include "fsdp/device_mesh.h"
#include "support/collective_checks.h"
#include "support/messages.h"
#include "support/multi_rank.h"

namespace fsdp::comm {
namespace group_communicator_test {

using testing::Gather;
using testing::has;
using testing::kGather;
using testing::kReduce;
using testing::kScatter;
using testing::message_of;
using testing::Reduce;
using testing::run_ranks;
using testing::Scatter;

std::shared_ptr<Communicator> world(MeshOptions options = {}) {
  return init_device_mesh("cpu", {{"dp_shard", -1}}, options).communicator("dp_shard");
}

TEST(GroupCommunicator, ExchangesValuesInRankOrder) {
  for (const int size : {1, 2, 3, 4, 5, 7}) {
    run_ranks(size, [size](int rank) {
      const auto communicator = world();
      communicator->reset_stats();
      const at::Tensor all = communicator->exchange(torch::tensor({{rank, 10 * rank}}, at::kDouble), {.operation = "norms", .unit = {}});
      ASSERT_EQ(all.sizes(), (std::vector<std::int64_t>{size, 1, 2}));
      for (int r = 0; r < size; ++r) EXPECT_EQ(all[r][0][1].item<double>(), 10.0 * r);
      EXPECT_EQ(communicator->stats().control_bytes, (size - 1) * 16);
      EXPECT_EQ(communicator->stats().control_messages, std::bit_width(static_cast<unsigned>(size - 1)));
      EXPECT_EQ(communicator->exchange(torch::empty({0}), {.operation = "nothing", .unit = {}}).numel(), 0);
    });
  }
}

TEST(GroupCommunicator, BroadcastsTheTextOfAnyRank) {
  for (const int size : {1, 2, 3, 4, 5, 6}) {
    run_ranks(size, [size](int rank) {
      const auto communicator = world();
      const auto rounds = std::bit_width(static_cast<unsigned>(size - 1));
      for (int root = 0; root < size; ++root) {
        communicator->reset_stats();
        const std::string text(100'000, static_cast<char>('a' + root));
        EXPECT_EQ(communicator->broadcast(rank == root ? text : "of another", root, {.operation = "text", .unit = {}}), text);
        const auto& stats = communicator->stats();
        EXPECT_LE(stats.control_messages, 2 * rounds);
        if (rank == root) {
          EXPECT_EQ(stats.control_bytes, rounds * (8 + 100'000));
        }
        const auto sent = communicator->exchange(at::full({1}, stats.control_bytes, at::kLong), {.operation = "sum", .unit = {}});
        EXPECT_EQ(sent.sum().item<std::int64_t>(), (size - 1) * (8 + 100'000));
        EXPECT_EQ(communicator->broadcast("", root, {.operation = "no text", .unit = {}}), "");
      }
    });
  }
}

TEST(GroupCommunicator, GathersTextsOnTheFirstRank) {
  for (const int size : {1, 2, 3, 5}) {
    run_ranks(size, [size](int rank) {
      const auto communicator = world();
      communicator->reset_stats();
      const auto text_of = [](int of) { return std::string(static_cast<std::size_t>(of * 10'000), static_cast<char>('a' + of)); };
      std::string expected;
      for (int of = 0; of < size && rank == 0; ++of) expected += text_of(of);
      EXPECT_EQ(communicator->gather(text_of(rank), {.operation = "texts", .unit = {}}), expected);
      const auto rounds = std::bit_width(static_cast<unsigned>(size - 1));
      EXPECT_EQ(communicator->stats().control_messages, rounds + (rank == 0 ? 0 : 1));
      EXPECT_EQ(communicator->stats().control_bytes, (size - 1) * 8 + rank * 10'000);
      EXPECT_EQ(communicator->gather(rank == 0 ? "first" : "", {.operation = "texts", .unit = {}}), rank == 0 ? "first" : "");
    });
  }
}

TEST(GroupCommunicator, ExpectEqualIsSilentWhereTextsAgree) {
  run_ranks(3, [] {
    const auto communicator = world();
    communicator->reset_stats();
    communicator->expect_equal("the same model", {.operation = "model description", .unit = {}});
    EXPECT_EQ(communicator->stats().control_bytes, 2 * 16);
  });
}

TEST(GroupCommunicator, ExpectEqualPrintsTheLinesThatDiffer) {
  run_ranks(3, [](int rank) {
    const auto communicator = world();
    const std::string text = "unit 'layers.0': 10 parameters\n" + std::string(rank == 2 ? "unit 'layers.1': 11" : "unit 'layers.1': 10") +
                             " parameters\nlast\n" + (rank == 2 ? "and more\n" : "");
    const std::string message = message_of([&] { communicator->expect_equal(text, {.operation = "model description", .unit = "gpt"}); });
    EXPECT_EQ(message,
              "model description of unit 'gpt': rank 0 and rank 2 differ. Every rank must build the same model and pass the same options.\n"
              "  line 2: rank 0 has 'unit 'layers.1': 10 parameters', rank 2 has 'unit 'layers.1': 11 parameters'\n"
              "  line 4: rank 0 has (no such line), rank 2 has 'and more'");
    communicator->barrier();  // Still usable: the ranks agreed on the disagreement.
  });
}

TEST(GroupCommunicator, ARankThatDiesFailsTheOthersAtOnce) {
  ::testing::internal::CaptureStderr();
  const int result =
      launch_ranks(3,
                   [] {
                     alarm(30);
                     const auto communicator = world();
                     const int rank = communicator->rank();
                     if (rank == 1) raise(SIGKILL);
                     Gather gather(*communicator, {{.numel = 1000, .dtype = at::kFloat}}, 1, false);
                     const std::string message = message_of<CommError>([&] { communicator->all_gather(gather.parts, kGather)->wait(); });
                     const std::string start = "all-gather of unit 'layers.0' on rank " + std::to_string(rank) + " of 3 failed: ";
                     if (!message.starts_with(start) || !has(message, " rank ") || !has(message, "has failed or ended"))
                       throw Error("message: " + message);
                     // And nothing that is tried afterwards hangs.
                     const std::string next = message_of<CommError>([&] { communicator->barrier(); });
                     if (!has(next, "was not started, because an earlier collective failed: all-gather of unit 'layers.0'"))
                       throw Error("next: " + next);
                     return 0;
                   },
                   {});
  EXPECT_EQ(result, 1);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "rank 1 was killed by signal 9 (Killed)\n");
}

// Whether a peer's death shows as a closed or as a broken connection is a matter of moments; the latter raises SIGPIPE.
TEST(GroupCommunicator, BrokenPipesDoNotEndARank) {
  run_ranks(2, [](int) {
    const auto communicator = world();
    std::array<int, 2> ends{};
    ASSERT_EQ(pipe(ends.data()), 0);
    close(ends[0]);
    EXPECT_EQ(write(ends[1], "x", 1), -1);
    EXPECT_EQ(errno, EPIPE);
    close(ends[1]);
  });
}

TEST(GroupCommunicator, ASigpipeHandlerOfTheProgramStays) {
  run_ranks(2, [](int) {
    static volatile std::sig_atomic_t raised = 0;
    ASSERT_NE(std::signal(SIGPIPE, [](int) { raised = 1; }), SIG_ERR);
    const auto communicator = world();
    raise(SIGPIPE);
    EXPECT_EQ(raised, 1);
  });
}

TEST(GroupCommunicator, ARootThatDiesFailsThoseWhoWaitForItsParts) {
  ::testing::internal::CaptureStderr();
  const int result = launch_ranks(3,
                                  [] {
                                    alarm(30);
                                    const auto communicator = world();
                                    if (communicator->rank() == 0) raise(SIGKILL);
                                    Scatter scatter(*communicator, {{.numel = 1000, .dtype = at::kFloat}}, 1, /*root=*/0, false);
                                    const std::string message =
                                        message_of<CommError>([&] { communicator->scatter(scatter.parts, 0, kScatter)->wait(); });
                                    if (!has(message, "scatter of unit 'layers.0' on rank") || !has(message, "has failed or ended"))
                                      throw Error("message: " + message);
                                    return 0;
                                  },
                                  {});
  EXPECT_EQ(result, 1);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "rank 0 was killed by signal 9 (Killed)\n");
}

TEST(GroupCommunicator, ARankThatDiesMidwayFailsPendingCollectives) {
  ::testing::internal::CaptureStderr();
  const int result =
      launch_ranks(3,
                   [] {
                     alarm(30);
                     const auto communicator = world();
                     Reduce reduce(*communicator, {{.numel = 1000, .dtype = at::kFloat}}, 1, 1);
                     auto pending = communicator->reduce_scatter(reduce.parts, 1, kReduce);
                     communicator->barrier();
                     Gather gather(*communicator, {{.numel = 1'000'000, .dtype = at::kFloat}}, 1, false);
                     if (communicator->rank() == 2) raise(SIGKILL);
                     auto dropped = message_of<CommError>([&] { communicator->all_gather(gather.parts, kGather); });  // Never waited for.
                     pending->wait();  // Its messages came before.
                     reduce.check();
                     return 0;
                   },
                   {});
  EXPECT_EQ(result, 1);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "rank 2 was killed by signal 9 (Killed)\n");
}

TEST(GroupCommunicator, TimeoutsAreHonoured) {
  for (const bool shared : {true, false}) {
    run_ranks(2, [shared](int rank) {
      const auto communicator = world({.timeout = std::chrono::milliseconds(500), .shared_memory = shared});
      if (rank == 1) {
        usleep(2'500'000);
        return;
      }
      const auto start = std::chrono::steady_clock::now();
      const std::string message = message_of<CommError>([&] { communicator->barrier(); });
      EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(2)) << "shared memory: " << shared;
      EXPECT_TRUE(message.starts_with("barrier on rank 0 of 2 failed: ")) << message;
      EXPECT_TRUE(has(message, "FSDP_DEBUG=1")) << message;
    });
  }
}

// A row's own numbers would be those of other ranks of the job.
TEST(GroupCommunicator, ErrorsInARowNameGlobalRanks) {
  for (const bool shared : {true, false}) {
    run_ranks(4, [shared](int rank) {
      const auto mesh =
          init_device_mesh("cpu", {{"dp_outer", 2}, {"dp_shard", 2}}, {.timeout = std::chrono::milliseconds(500), .shared_memory = shared});
      const auto row = mesh.communicator("dp_shard");
      if (rank < 2) return;
      const auto differ = message_of<Error>([&] { row->expect_equal("of " + std::to_string(rank), {.operation = "check", .unit = {}}); });
      EXPECT_TRUE(has(differ, "check: rank 2 and rank 3 differ") && has(differ, "rank 2 has 'of 2', rank 3 has 'of 3'")) << differ;
      if (rank == 3) {
        usleep(1'500'000);
        return;
      }
      const auto message = message_of<CommError>([&] { row->barrier(); });
      EXPECT_TRUE(message.starts_with("barrier on rank 2 of 4 (one of 2 of 'dp_shard') failed: ")) << message;
      EXPECT_TRUE(has(message, "rank 3)")) << message;
    });
  }
}

TEST(GroupCommunicator, DifferentCallsInARowNameGlobalRanks) {
  for (const bool shared : {true, false}) {
    run_ranks(4, [shared](int rank) {
      const auto mesh = init_device_mesh("cpu", {{"dp_outer", 2}, {"dp_shard", 2}}, {.shared_memory = shared});
      const auto row = mesh.communicator("dp_shard");
      if (rank < 2) return;
      const auto message =
          message_of<CommError>([&] { rank == 2 ? row->barrier() : row->expect_equal("", {.operation = "check", .unit = {}}); });
      EXPECT_TRUE(has(message, "the ranks make different calls: rank 2: ") && has(message, "; rank 3: ")) << message;
    });
  }
}

class DebugMode : public ::testing::Test {
 protected:
  void SetUp() override { setenv("FSDP_DEBUG", "1", 1); }
  void TearDown() override { unsetenv("FSDP_DEBUG"); }
};

TEST_F(DebugMode, AgreeingCallsPass) {
  run_ranks(3, [] {
    const auto communicator = world();
    for (int i = 0; i < 5; ++i) {
      Gather gather(*communicator, {{.numel = 10, .dtype = at::kFloat}}, i, false);
      communicator->all_gather(gather.parts, kGather)->wait();
      gather.check();
    }
    communicator->barrier();
  });
}

TEST_F(DebugMode, DifferentCallsPrintBothSides) {
  run_ranks(2, [](int rank) {
    const auto communicator = world();
    const std::string message = message_of<CommError>([&] {
      if (rank == 0) {
        Gather gather(*communicator, {{.numel = 10, .dtype = at::kFloat}}, 0, false);
        communicator->all_gather(gather.parts, {.operation = "all-gather", .unit = "layers.3"})->wait();
      } else {
        Reduce reduce(*communicator, {{.numel = 10, .dtype = at::kFloat}}, 0, 1);
        communicator->reduce_scatter(reduce.parts, 1, {.operation = "reduce-scatter", .unit = "layers.2"})->wait();
      }
    });
    // #1 was the mesh's own barrier.
    EXPECT_TRUE(has(message, "rank 0: #2 all-gather of unit 'layers.3'; rank 1: #2 reduce-scatter of unit 'layers.2'")) << message;
    EXPECT_TRUE(has(message, "in the same order")) << message;
  });
}

// Without it, a collective begins, and its wait() is the error.
TEST_F(DebugMode, ACallThatDiffersDoesNotBegin) {
  run_ranks(3, [](int rank) {
    const auto communicator = world();
    Gather gather(*communicator, {{.numel = 10, .dtype = at::kFloat}}, 0, false);
    const comm::Label label{.operation = "all-gather", .unit = rank == 2 ? "layers.4" : "layers.3"};
    const std::string message = message_of<CommError>([&] { communicator->all_gather(gather.parts, label); });
    EXPECT_TRUE(has(message, "rank 0: #2 all-gather of unit 'layers.3'; rank 2: #2 all-gather of unit 'layers.4'")) << message;
  });
}

TEST_F(DebugMode, DifferentSizesPrintBothSides) {
  run_ranks(3, [](int rank) {
    const auto communicator = world();
    Gather gather(*communicator, {{.numel = rank == 2 ? 11 : 10, .dtype = at::kFloat}}, 0, false);
    const std::string message = message_of<CommError>([&] { communicator->all_gather(gather.parts, kGather)->wait(); });
    EXPECT_TRUE(has(message, "rank 0: #2 all-gather of unit 'layers.0' (40 bytes); rank 2: #2 all-gather of unit 'layers.0' (44 bytes)"))
        << message;
  });
}

TEST_F(DebugMode, ARankThatEndsEarlyShowsOnBothSides) {
  run_ranks(2, [](int rank) {
    auto communicator = world();
    Gather gather(*communicator, {{.numel = 10, .dtype = at::kFloat}}, 0, false);
    const std::string both = "rank 0: #2 end of training; rank 1: #2 all-gather of unit 'layers.0'";
    if (rank == 1) {
      const std::string message = message_of<CommError>([&] { communicator->all_gather(gather.parts, kGather)->wait(); });
      EXPECT_TRUE(has(message, both)) << message;
    } else {
      ::testing::internal::CaptureStderr();
      communicator.reset();
      const std::string printed = ::testing::internal::GetCapturedStderr();
      EXPECT_TRUE(has(printed, both)) << printed;
    }
  });
}

TEST_F(DebugMode, ARankThatFailsLeavesWithoutAWord) {
  run_ranks(2, [](int rank) {
    const auto start = std::chrono::steady_clock::now();
    const auto step = [&] {
      const auto communicator = world({.timeout = std::chrono::seconds(20)});
      if (rank == 0) throw std::runtime_error("loss is nan");
      communicator->barrier();
    };
    const auto message = message_of<std::exception>(step);
    EXPECT_NE(message, "no error");
    EXPECT_EQ(message == "loss is nan", rank == 0) << message;
    EXPECT_FALSE(has(message, "different calls")) << message;
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
  });
}

}  // namespace group_communicator_test
}  // namespace fsdp::comm
