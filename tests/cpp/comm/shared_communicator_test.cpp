#include "comm/collectives/shared_communicator.h"

#include <sys/resource.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/device_mesh.h"
#include "memory/device_memory.h"
#include "memory/shared_heap.h"
#include "support/collective_checks.h"
#include "support/meshes.h"
#include "support/messages.h"
#include "support/multi_rank.h"
#include "support/shared_memory.h"

namespace fsdp::comm {
namespace shared_communicator_test {

using testing::check_many_in_flight;
using testing::check_reductions_of_some;
using testing::Gather;
using testing::has;
using testing::in_heap;
using testing::kGather;
using testing::kReduce;
using testing::leaves_no_trace;
using testing::message_of;
using testing::PieceShape;
using testing::Reduce;
using testing::run_ranks;
using testing::shares;
using testing::traces_of_heaps;
using testing::world;

const std::vector<PieceShape> kMixed = {
    {.numel = 33, .dtype = at::kFloat},
    {.numel = 0, .dtype = at::kFloat},
    {.numel = 7, .dtype = at::kDouble, .out_dtype = at::kDouble},
    {.numel = 1, .dtype = at::kBFloat16, .out_dtype = at::kFloat, .accumulate = true},
    {.numel = 129, .dtype = at::kHalf, .out_dtype = at::kHalf},
    {.numel = 300, .dtype = at::kBFloat16, .out_dtype = at::kBFloat16},
    {.numel = 50001, .dtype = at::kFloat, .out_dtype = at::kFloat, .accumulate = true},
};

std::int64_t bytes_of(const std::vector<PieceShape>& shapes) {
  std::int64_t bytes = 0;
  for (const PieceShape& shape : shapes) bytes += shape.numel * static_cast<std::int64_t>(c10::elementSize(shape.dtype));
  return bytes;
}

class SharedCommunicatorOfSize : public testing::SharedMemoryTest, public ::testing::WithParamInterface<int> {};
using SharedCommunicatorTest = testing::SharedMemoryTest;

TEST_P(SharedCommunicatorOfSize, GathersFromInsideAndOutsideOfTheHeap) {
  run_ranks(GetParam(), [](int rank) {
    const auto communicator = world();
    ASSERT_TRUE(shares(*communicator));
    for (const bool alias : {false, true}) {
      for (int where = 0; where < 3; ++where) {
        Gather gather(*communicator, kMixed, 1, alias);
        for (std::size_t i = 0; i < gather.parts.size(); ++i) {
          auto& part = gather.parts[i];
          // Not the same on all ranks: each says of each part where it lies.
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
    EXPECT_EQ(communicator->stats().all_gather_bytes, 6 * (communicator->size() - 1) * bytes_of(kMixed));
    EXPECT_EQ(communicator->stats().shared_memory_bytes, communicator->stats().all_gather_bytes);
  });
}

// The bits that a sum of messages has: Reduce computes them element by element.
TEST_P(SharedCommunicatorOfSize, ReducesFromInsideAndOutsideOfTheHeap) {
  run_ranks(GetParam(), [](int rank) {
    const auto communicator = world();
    for (int where = 0; where < 3; ++where) {
      Reduce reduce(*communicator, kMixed, 1, 1.0 / 3);
      for (std::size_t i = 0; i < reduce.parts.size(); ++i) {
        EXPECT_EQ(reduce.parts[i].staging.numel(), 0);
        if (where == 0 || (where == 1 && (i + static_cast<std::size_t>(rank)) % 2 == 0)) continue;
        reduce.parts[i].unreduced = in_heap(reduce.parts[i].unreduced);
      }
      const auto pending = communicator->reduce_scatter(reduce.parts, 1.0 / 3, kReduce);
      pending->wait();
      pending->wait();  // Accumulates once.
      reduce.check();
    }
    EXPECT_EQ(communicator->stats().shared_memory_bytes, 3 * (communicator->size() - 1) * bytes_of(kMixed));
  });
}

TEST_P(SharedCommunicatorOfSize, RanksThatGiveNothingCountAsZero) {
  run_ranks(GetParam(), [] { check_reductions_of_some(*world(), kMixed); });
}

// Shards that are written past the caches.
TEST_P(SharedCommunicatorOfSize, GathersLargeShards) {
  run_ranks(GetParam(), [](int rank) {
    const auto communicator = world();
    for (const bool alias : {false, true}) {
      Gather gather(*communicator, {{.numel = 700'001, .dtype = at::kFloat}, {.numel = 7, .dtype = at::kFloat}}, 1, alias);
      auto& part = gather.parts[0];
      part.full = in_heap(part.full);
      if (alias) part.shard = part.full.narrow(0, rank * part.shard.numel(), part.shard.numel());
      communicator->all_gather(gather.parts, kGather)->wait();
      gather.check();
    }
  });
}

// More than a mailbox has room for, on two communicators, waited for in another order on each rank.
TEST_P(SharedCommunicatorOfSize, ManyCollectivesMayBeInFlight) {
  run_ranks(GetParam(), [](int) {
    const auto mesh = init_device_mesh("cpu", {{"dp_shard", -1}}, {.shared_memory = true});
    check_many_in_flight(*mesh.communicator("dp_shard"), *mesh.new_communicator("dp_shard"), 70, at::kBFloat16, true);
  });
}

TEST_P(SharedCommunicatorOfSize, APendingThatIsDroppedStillServesThePeers) {
  run_ranks(GetParam(), [](int rank) {
    const auto communicator = world();
    Gather gather(*communicator, {{.numel = 100000, .dtype = at::kFloat}}, 3, false);
    auto pending = communicator->all_gather(gather.parts, kGather);
    if (rank == 0) {
      pending.reset();
    } else {
      pending->wait();
    }
    gather.check();
    communicator->barrier();
  });
}

// As long as rank 0 waits for its collectives, the others wait for messages of it: they advance theirs nevertheless.
TEST_P(SharedCommunicatorOfSize, WhoWaitsForMessagesServes) {
  run_ranks(GetParam(), [](int rank) {
    const auto communicator = world();
    const auto messages = world(false);
    for (int round = 0; round < 20 / testing::kSlowdown; ++round) {
      Gather gather(*communicator, kMixed, round, false);
      Reduce reduce(*communicator, kMixed, round, 1);
      const auto gathering = communicator->all_gather(gather.parts, kGather);
      const auto reducing = communicator->reduce_scatter(reduce.parts, 1, kReduce);
      if (rank > 0) messages->barrier();
      if (round % 2 == 0) gathering->wait();
      reducing->wait();
      gathering->wait();
      if (rank == 0) messages->barrier();
      gather.check();
      reduce.check();
    }
  });
}

// Buffers may be written as soon as wait() has returned.
TEST_P(SharedCommunicatorOfSize, WhatIsPublishedIsReadBeforeTheWaitEnds) {
  run_ranks(GetParam(), [](int rank) {
    const auto communicator = world();
    Gather gather(*communicator, {{.numel = 20000, .dtype = at::kFloat}}, 1, false);
    Reduce reduce(*communicator, {{.numel = 20000, .dtype = at::kFloat}}, 1, 1);
    gather.parts[0].full = in_heap(gather.parts[0].full);
    reduce.parts[0].unreduced = in_heap(reduce.parts[0].unreduced);
    const at::Tensor unreduced = reduce.parts[0].unreduced.clone();
    for (int round = 0; round < 100; ++round) {
      gather.parts[0].full.fill_(-1);
      reduce.parts[0].unreduced.copy_(unreduced);
      const auto gathering = communicator->all_gather(gather.parts, kGather);
      const auto reducing = communicator->reduce_scatter(reduce.parts, 1, kReduce);
      if (round % 5 == rank) usleep(3000);
      reducing->wait();
      reduce.parts[0].unreduced.fill_(7);
      reduce.check();
      gathering->wait();
      gather.check();
    }
  });
}

// A rank that is done may take its mesh along while others have yet to look.
TEST_P(SharedCommunicatorOfSize, MeshesComeAndGo) {
  run_ranks(GetParam(), [](int rank) {
    for (int round = 0; round < 10; ++round) {
      const auto communicator = world();
      Gather gather(*communicator, kMixed, round, false);
      Reduce reduce(*communicator, kMixed, round, 1);
      const auto gathering = communicator->all_gather(gather.parts, kGather);
      const auto reducing = communicator->reduce_scatter(reduce.parts, 1, kReduce);
      if (round % communicator->size() == rank) usleep(10'000);
      gathering->wait();
      reducing->wait();
      gather.check();
      reduce.check();
    }
  });
}

TEST_P(SharedCommunicatorOfSize, LeavesNoTrace) {
  run_ranks(GetParam(), [] {
    {
      const auto communicator = world();
      Gather gather(*communicator, kMixed, 1, false);
      communicator->all_gather(gather.parts, kGather)->wait();
      EXPECT_EQ(traces_of_heaps(), 2 * communicator->size());  // all heaps, its own descriptor, and those of the others' processes
    }
    EXPECT_TRUE(leaves_no_trace());
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, SharedCommunicatorOfSize, ::testing::Values(2, 3, 4));

TEST_F(SharedCommunicatorTest, OutMayBeItsOwnRegionOfUnreduced) {
  run_ranks(3, [](int rank) {
    const auto communicator = world();
    Reduce reduce(*communicator, {{.numel = 1000, .dtype = at::kFloat}}, 4, 0.25);
    reduce.parts[0].unreduced = in_heap(reduce.parts[0].unreduced);
    reduce.parts[0].out = reduce.parts[0].unreduced.narrow(0, rank * 1000, 1000);
    communicator->reduce_scatter(reduce.parts, 0.25, kReduce)->wait();
    reduce.check();
  });
}

TEST_F(SharedCommunicatorTest, ARankThatIsLateTimesOut) {
  run_ranks(2, [](int rank) {
    const auto mesh = init_device_mesh("cpu", {{"dp_shard", -1}}, {.timeout = std::chrono::milliseconds(3000), .shared_memory = true});
    const auto communicator = mesh.communicator("dp_shard");
    if (rank == 1) {
      usleep(6'000'000);
      return;
    }
    Gather gather(*communicator, kMixed, 1, false);
    const auto message = message_of<CommError>([&] { communicator->all_gather(gather.parts, kGather)->wait(); });
    EXPECT_TRUE(has(message, "Timed out waiting 3000ms (receiving from rank 1)") && has(message, "raise MeshOptions::timeout")) << message;
  });
}

void expect_messages(const Communicator& communicator) {
  EXPECT_FALSE(shares(communicator));
  EXPECT_EQ(traces_of_heaps(), 0);
}

TEST_F(SharedCommunicatorTest, IsTurnedOffByTheOption) {
  run_ranks(2, [](int rank) { expect_messages(*world(rank == 1)); });  // by one rank for all
}

TEST_F(SharedCommunicatorTest, IsChosenByItselfUnlessTheOptionSaysNo) {
  run_ranks(2, [] {
    EXPECT_TRUE(shares(*init_device_mesh("cpu", {{"dp_shard", -1}}).communicator("dp_shard")));
    EXPECT_FALSE(shares(*world(/*shared=*/false)));
  });
}

TEST_F(SharedCommunicatorTest, IsTurnedOffByTheVariable) {
  run_ranks(2, [](int rank) {
    if (rank == 0) setenv("FSDP_SHARED_MEMORY", "0", 1);
    const auto communicator = world();
    expect_messages(*communicator);
    Gather gather(*communicator, kMixed, 1, false);
    communicator->all_gather(gather.parts, kGather)->wait();
    gather.check();
    EXPECT_GT(communicator->stats().all_gather_bytes, 0);
    EXPECT_EQ(communicator->stats().shared_memory_bytes, 0);
  });
}

TEST_F(SharedCommunicatorTest, SendsMessagesWhereTheSystemRefuses) {
  ::testing::internal::CaptureStderr();
  run_ranks(2, [](int rank) {
    const rlimit limit{.rlim_cur = 1 << 20, .rlim_max = RLIM_INFINITY};
    if (rank == 1) setrlimit(RLIMIT_FSIZE, &limit);
    for (int round = 0; round < 2; ++round) {  // Says it once.
      const auto communicator = world();
      expect_messages(*communicator);
      Gather gather(*communicator, kMixed, 1, false);
      communicator->all_gather(gather.parts, kGather)->wait();
      gather.check();
    }
  });
  EXPECT_EQ(::testing::internal::GetCapturedStderr(),
            "libfsdp: the ranks of this host do not share memory, and send messages instead: the limit of files' sizes: File too large. "
            "FSDP_SHARED_MEMORY=0 turns the attempt off.\n");
}

}  // namespace shared_communicator_test
}  // namespace fsdp::comm
