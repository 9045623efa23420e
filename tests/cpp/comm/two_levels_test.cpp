// Rows that span several hosts: shared memory within a host, and messages between ranks of equal place.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "comm/collectives/shared_communicator.h"
#include "comm/launch/launch.h"
#include "comm/rank_order_sum.h"
#include "fsdp/device_mesh.h"
#include "support/collective_checks.h"
#include "support/hosts.h"
#include "support/messages.h"
#include "support/multi_rank.h"
#include "support/shared_memory.h"
#include "support/stack.h"

namespace fsdp::comm {
namespace two_levels_test {

using testing::can_pretend_hosts;
using testing::check_many_in_flight;
using testing::Gather;
using testing::has;
using testing::in_heap;
using testing::kGather;
using testing::kReduce;
using testing::leaves_no_trace;
using testing::message_of;
using testing::PieceShape;
using testing::pretend_hosts;
using testing::Reduce;
using testing::run_ranks;
using testing::shares;
using testing::world;

const std::vector<PieceShape> kMixed = {
    {.numel = 33, .dtype = at::kFloat},
    {.numel = 0, .dtype = at::kFloat},
    {.numel = 7, .dtype = at::kDouble, .out_dtype = at::kDouble},
    {.numel = 1, .dtype = at::kBFloat16, .out_dtype = at::kFloat, .accumulate = true},
    {.numel = 129, .dtype = at::kHalf, .out_dtype = at::kHalf},
    {.numel = 50001, .dtype = at::kFloat, .out_dtype = at::kFloat, .accumulate = true},
};

struct Hosts {
  int count;
  int ranks;  ///< Of each.
};

class TwoLevels : public testing::SharedMemoryTest, public ::testing::WithParamInterface<Hosts> {
 protected:
  void SetUp() override {
    SharedMemoryTest::SetUp();
    if (!can_pretend_hosts()) GTEST_SKIP() << "this system refuses mount namespaces";
  }
  /// fn(rank), on the hosts.
  template <typename Fn>
  static void run(const Fn& fn, Hosts hosts = GetParam()) {
    run_ranks(hosts.count * hosts.ranks, [&](int rank) {
      pretend_hosts(rank, hosts.ranks);
      fn(rank);
    });
  }
};

std::int64_t summed_bytes(const std::vector<PieceShape>& shapes) {
  std::int64_t bytes = 0;
  for (const PieceShape& shape : shapes) bytes += shape.numel * (shape.dtype == at::kDouble ? 8 : 4);
  return bytes;
}

std::int64_t bytes_of(const std::vector<PieceShape>& shapes) {
  std::int64_t bytes = 0;
  for (const PieceShape& shape : shapes) bytes += shape.numel * static_cast<std::int64_t>(c10::elementSize(shape.dtype));
  return bytes;
}

TEST_P(TwoLevels, GathersAndEveryByteCrossesOncePerHost) {
  run([](int rank) {
    const auto [hosts, ranks] = GetParam();
    const auto communicator = world();
    ASSERT_TRUE(shares(*communicator));
    for (const bool alias : {false, true}) {
      for (int where = 0; where < 3; ++where) {
        Gather gather(*communicator, kMixed, 1, alias);
        for (std::size_t i = 0; i < gather.parts.size(); ++i) {
          auto& part = gather.parts[i];
          if (where == 0 || (where == 1 && (i + static_cast<std::size_t>(rank)) % 2 == 0)) continue;
          part.full = in_heap(part.full);
          if (alias) part.shard = part.full.narrow(0, rank * part.shard.numel(), part.shard.numel());
        }
        const auto pending = communicator->all_gather(gather.parts, kGather);
        pending->wait();
        pending->wait();  // Idempotent.
        gather.check();
      }
    }
    const auto& stats = communicator->stats();
    EXPECT_EQ(stats.all_gather_bytes, 6 * (communicator->size() - 1) * bytes_of(kMixed));
    EXPECT_EQ(stats.all_gather_bytes - stats.shared_memory_bytes, 6 * (hosts - 1) * bytes_of(kMixed));
    EXPECT_EQ(stats.shared_memory_bytes, 6 * hosts * (ranks - 1) * bytes_of(kMixed));
  });
}

// Shards that are written past the caches.
TEST_P(TwoLevels, GathersLargeShards) {
  run([](int) {
    const auto communicator = world();
    Gather gather(*communicator, {{.numel = 700'001, .dtype = at::kFloat}, {.numel = 7, .dtype = at::kFloat}}, 1, /*alias=*/false);
    communicator->all_gather(gather.parts, kGather)->wait();
    gather.check();
  });
}

/// One sum over all ranks where the hosts have a power of two of them; else one over the hosts' sums.
at::Tensor expected_sum_of(const std::vector<at::Tensor>& sources, const at::Tensor& old, int ranks, double scale, bool accumulate) {
  const auto precise = sum_dtype(sources[0].scalar_type());
  std::vector<at::Tensor> of_hosts;
  for (std::size_t first = 0; first < sources.size(); first += static_cast<std::size_t>(ranks)) {
    const std::vector<at::Tensor> of_host(sources.begin() + static_cast<std::ptrdiff_t>(first),
                                          sources.begin() + static_cast<std::ptrdiff_t>(first) + ranks);
    of_hosts.push_back(testing::expected_sum(of_host, at::zeros({old.numel()}, precise), {}));
  }
  return testing::expected_sum(of_hosts, old, {.scale = scale, .accumulate = accumulate});
}

TEST_P(TwoLevels, ReducesInTheOrderOfTheHosts) {
  run([](int rank) {
    const auto [hosts, ranks] = GetParam();
    const auto communicator = world();
    for (int where = 0; where < 3; ++where) {
      Reduce reduce(*communicator, kMixed, 1, 1.0 / 3);
      for (std::size_t i = 0; i < reduce.parts.size(); ++i) {
        auto& part = reduce.parts[i];
        const auto numel = part.out.numel();
        std::vector<at::Tensor> sources;
        for (int r = 0; r < communicator->size(); ++r) {
          const auto seed = 1 + 1000 * static_cast<std::int64_t>(i) + r;
          const auto of_rank = testing::numbers(communicator->size() * numel, seed, part.unreduced.scalar_type());
          sources.push_back(of_rank.narrow(0, rank * numel, numel));
        }
        const auto expected = expected_sum_of(sources, part.out, ranks, 1.0 / 3, part.accumulate);
        if (ranks != 3) {
          EXPECT_TRUE(numel == 0 || testing::same_bits(expected, reduce.expected[i])) << "part " << i;
        }
        if (numel > 0) reduce.expected[i] = expected;
        if (where == 0 || (where == 1 && (i + static_cast<std::size_t>(rank)) % 2 == 0)) continue;
        part.unreduced = in_heap(part.unreduced);
      }
      const auto pending = communicator->reduce_scatter(reduce.parts, 1.0 / 3, kReduce);
      pending->wait();
      pending->wait();  // Accumulates once.
      reduce.check();
    }
    const auto& stats = communicator->stats();
    EXPECT_EQ(stats.reduce_scatter_bytes - stats.shared_memory_bytes, 3 * (hosts - 1) * summed_bytes(kMixed));
    EXPECT_EQ(stats.shared_memory_bytes, 3 * hosts * (ranks - 1) * bytes_of(kMixed));
  });
}

TEST(TwoLevelsOfTwo, RanksThatGiveNothingCountAsZero) {
  if (!can_pretend_hosts()) GTEST_SKIP() << "this system refuses mount namespaces";
  run_ranks(4, [](int rank) {
    pretend_hosts(rank, 2);
    testing::check_reductions_of_some(*world(), kMixed, /*all_send=*/true);  // the sums of their host
  });
}

// More than a mailbox has room for, on two communicators, waited for in another order on each rank.
TEST_P(TwoLevels, ManyCollectivesMayBeInFlight) {
  run([](int) {
    const auto mesh = init_device_mesh("cpu", {{"dp_shard", -1}});
    const bool in_rank_order = GetParam().ranks != 3;
    check_many_in_flight(*mesh.communicator("dp_shard"), *mesh.new_communicator("dp_shard"), 70, at::kFloat, in_rank_order);
  });
}

// Buffers may be written as soon as wait() has returned, also where a rank drops its collective.
TEST_P(TwoLevels, WhatIsPublishedIsReadBeforeTheWaitEnds) {
  run([](int rank) {
    const auto communicator = world();
    Gather gather(*communicator, {{.numel = 20000, .dtype = at::kFloat}}, 1, false);
    Reduce reduce(*communicator, {{.numel = 20000, .dtype = at::kFloat}}, 1, 1);
    gather.parts[0].full = in_heap(gather.parts[0].full);
    reduce.parts[0].unreduced = in_heap(reduce.parts[0].unreduced);
    const at::Tensor unreduced = reduce.parts[0].unreduced.clone();
    for (int round = 0; round < 50; ++round) {
      gather.parts[0].full.fill_(-1);
      reduce.parts[0].unreduced.copy_(unreduced);
      auto gathering = communicator->all_gather(gather.parts, kGather);
      const auto reducing = communicator->reduce_scatter(reduce.parts, 1, kReduce);
      if (round % 7 == rank) usleep(3000);
      reducing->wait();
      reduce.parts[0].unreduced.fill_(7);
      if (GetParam().ranks != 3) reduce.check();
      gathering.reset();
      gather.check();
    }
  });
}

TEST_P(TwoLevels, MeshesComeAndGoAndLeaveNoTrace) {
  run([](int rank) {
    for (int round = 0; round < 5; ++round) {
      const auto communicator = world();
      Gather gather(*communicator, kMixed, round, false);
      Reduce reduce(*communicator, kMixed, round, 1);
      const auto gathering = communicator->all_gather(gather.parts, kGather);
      const auto reducing = communicator->reduce_scatter(reduce.parts, 1, kReduce);
      communicator->exchange(at::ones({3}), {.operation = "norms", .unit = {}});
      if (round % communicator->size() == rank) usleep(10'000);
      gathering->wait();
      reducing->wait();
      gather.check();
    }
    EXPECT_TRUE(leaves_no_trace());
  });
}

TEST_P(TwoLevels, RanksThatDivergeAreToldApart) {
  run([](int rank) {
    const int last = GetParam().count * GetParam().ranks - 1;
    const auto communicator = world();
    Gather gather(*communicator, kMixed, 1, false);
    const Label other = {.operation = "all-gather", .unit = "layers.1"};
    const auto message = message_of<CommError>([&] { communicator->all_gather(gather.parts, rank == last ? other : kGather)->wait(); });
    EXPECT_TRUE(has(message, "the ranks make different calls") && has(message, "layers.0") && has(message, "layers.1")) << message;
    EXPECT_TRUE(has(message_of<CommError>([&] { communicator->barrier(); }), "an earlier collective failed"));
  });
}

// Parameters after some steps have the bits that messages give them, and of other ranks' gradients nothing is lost.
TEST_P(TwoLevels, TrainsAsMessagesDo) {
  run([](int rank) {
    if (GetParam().ranks == 3) return;  // Another order of the sums.
    std::vector<std::vector<at::Tensor>> results;
    for (const bool shared : {true, false}) {
      const auto mesh = init_device_mesh("cpu", {{"dp_shard", -1}}, {.shared_memory = shared});
      ASSERT_EQ(shares(*mesh.communicator("dp_shard")), shared);
      auto model = testing::make_stack();
      auto sharded = fully_shard(*model, {.mesh = mesh, .units = testing::stack_units()});
      AdamW optimizer(*model, {.lr = 1e-2});
      for (int step = 0; step < 3; ++step) {
        testing::stack_loss(model, step, rank).backward();
        sharded.clip_grad_norm(1.0);
        optimizer.step();
        optimizer.zero_grad();
      }
      auto& values = results.emplace_back();
      for (const auto& [name, value] : sharded.full_parameters()) values.push_back(value.clone());
    }
    ASSERT_EQ(results[0].size(), results[1].size());
    for (std::size_t i = 0; i < results[0].size(); ++i) EXPECT_TRUE(testing::same_bits(results[0][i], results[1][i])) << i;
  });
}

INSTANTIATE_TEST_SUITE_P(Hosts, TwoLevels, ::testing::Values(Hosts{2, 2}, Hosts{3, 2}, Hosts{2, 3}),
                         [](const auto& info) { return std::to_string(info.param.count) + "x" + std::to_string(info.param.ranks); });

using TwoLevelsFailures = TwoLevels;

TEST_P(TwoLevelsFailures, AKilledRankFailsAllOthersSoon) {
  const int ranks = GetParam().count * GetParam().ranks;
  for (int victim = 0; victim < ranks; ++victim) {
    ::testing::internal::CaptureStderr();
    const auto train = [&] {
      alarm(100);
      const int rank = std::atoi(std::getenv("RANK"));
      pretend_hosts(rank, GetParam().ranks);
      auto communicator = world();
      Gather gather(*communicator, {{.numel = 100'003, .dtype = at::kFloat}}, 1, false);
      Reduce reduce(*communicator, {{.numel = 50'003, .dtype = at::kFloat}}, 1, 1);
      const auto message = message_of<CommError>([&] {
        for (int round = 0;; ++round) {
          const auto gathering = communicator->all_gather(gather.parts, kGather);
          if (rank == victim && round == 5 + victim) kill(getpid(), SIGKILL);
          communicator->reduce_scatter(reduce.parts, 1, kReduce)->wait();
          gathering->wait();
        }
      });
      if (!has(message, "rank " + std::to_string(victim) + ")")) throw Error("message: " + message);
      communicator.reset();
      if (!leaves_no_trace()) throw Error("a heap is still mapped");
      return 0;
    };
    EXPECT_EQ(launch_ranks(ranks, train, {}), 1);
    EXPECT_EQ(::testing::internal::GetCapturedStderr(), "rank " + std::to_string(victim) + " was killed by signal 9 (Killed)\n");
  }
}

// The late rank is on another host than some, and a neighbour of others.
TEST_P(TwoLevelsFailures, ALateRankTimesOut) {
  run([](int rank) {
    const auto mesh = init_device_mesh("cpu", {{"dp_shard", -1}}, {.timeout = std::chrono::milliseconds(3000)});
    const auto communicator = mesh.communicator("dp_shard");
    if (rank == 3) {
      usleep(6'000'000);
      return;
    }
    Gather gather(*communicator, kMixed, 1, false);
    const auto pending = communicator->all_gather(gather.parts, kGather);
    usleep(500'000);  // Gloo's wait for the other host ends before this rank's own, and closes the connections: that is not what is told.
    const auto message = message_of<CommError>([&] { pending->wait(); });
    EXPECT_TRUE(has(message, "imed out")) << message;
  });
}

INSTANTIATE_TEST_SUITE_P(Hosts, TwoLevelsFailures, ::testing::Values(Hosts{2, 2}),
                         [](const auto& info) { return std::to_string(info.param.count) + "x" + std::to_string(info.param.ranks); });

class Layouts : public TwoLevels {};

// Hosts with different numbers of ranks, or whose ranks are not in a row, send messages.
TEST_F(Layouts, OtherLayoutsSendMessages) {
  for (const auto& hosts : {std::vector<int>{0, 1, 1, 1}, {0, 1, 0, 1}, {0, 0, 0, 0, 1, 1}}) {
    run_ranks(static_cast<int>(hosts.size()), [&](int rank) {
      pretend_hosts(hosts[static_cast<std::size_t>(rank)], 1);
      const auto communicator = world();
      EXPECT_FALSE(shares(*communicator));
      Gather gather(*communicator, kMixed, 1, false);
      communicator->all_gather(gather.parts, kGather)->wait();
      gather.check();
    });
  }
}

TEST_F(Layouts, OneOptionTurnsItOffForAll) {
  run(
      [](int rank) {
        const auto communicator = world(rank != 2);
        EXPECT_FALSE(shares(*communicator));
      },
      {2, 2});
}

}  // namespace two_levels_test
}  // namespace fsdp::comm
