#include "comm/collectives/pairwise_communicator.h"

#include <csignal>
#include <memory>
#include <stdexcept>
#include <string>

#include "fsdp/device_mesh.h"
#include "support/collective_checks.h"
#include "support/failing_operator.h"
#include "support/multi_rank.h"

namespace fsdp::comm {
namespace pairwise_communicator_test {

using testing::check_many_in_flight;
using testing::check_reductions_of_some;
using testing::Gather;
using testing::kGather;
using testing::kReduce;
using testing::kScatter;
using testing::PieceShape;
using testing::Reduce;
using testing::run_ranks;
using testing::Scatter;

std::shared_ptr<Communicator> world() {
  return init_device_mesh("cpu", {{"dp_shard", -1}}, {.shared_memory = false}).communicator("dp_shard");
}

// One of each dtype, an empty one between them, and one large enough for many TCP segments.
const std::vector<PieceShape> kMixed = {
    {.numel = 33, .dtype = at::kFloat},
    {.numel = 0, .dtype = at::kFloat},
    {.numel = 7, .dtype = at::kDouble, .out_dtype = at::kDouble},
    {.numel = 1, .dtype = at::kBFloat16, .out_dtype = at::kFloat, .accumulate = true},
    {.numel = 129, .dtype = at::kHalf, .out_dtype = at::kHalf},
    {.numel = 300, .dtype = at::kBFloat16, .out_dtype = at::kBFloat16},
    {.numel = 50000, .dtype = at::kFloat, .out_dtype = at::kFloat, .accumulate = true},
};

class PairwiseCommunicatorOfSize : public ::testing::TestWithParam<int> {};

TEST_P(PairwiseCommunicatorOfSize, AllGathersPiecesOfAllDtypes) {
  run_ranks(GetParam(), [] {
    const auto communicator = world();
    for (const bool alias : {false, true}) {
      Gather gather(*communicator, kMixed, 1, alias);
      const auto pending = communicator->all_gather(gather.parts, kGather);
      pending->wait();
      pending->wait();  // Idempotent.
      gather.check();
    }
  });
}

TEST_P(PairwiseCommunicatorOfSize, ReduceScattersPiecesOfAllDtypes) {
  run_ranks(GetParam(), [] {
    const auto communicator = world();
    Reduce reduce(*communicator, kMixed, 1, 1.0 / 3);
    const auto pending = communicator->reduce_scatter(reduce.parts, 1.0 / 3, kReduce);
    pending->wait();
    pending->wait();  // Accumulates once.
    reduce.check();
  });
}

TEST_P(PairwiseCommunicatorOfSize, RanksThatGiveNothingCountAsZero) {
  run_ranks(GetParam(), [] { check_reductions_of_some(*world(), kMixed); });
}

TEST_P(PairwiseCommunicatorOfSize, SendsEachByteOnceToEachPeer) {
  run_ranks(GetParam(), [](int rank) {
    const auto communicator = world();
    communicator->reset_stats();
    std::int64_t shard_bytes = 0;
    for (const PieceShape& shape : kMixed) shard_bytes += shape.numel * static_cast<std::int64_t>(c10::elementSize(shape.dtype));
    Gather gather(*communicator, kMixed, 1, false);
    Reduce reduce(*communicator, kMixed, 1, 1);
    communicator->all_gather(gather.parts, kGather)->wait();
    communicator->reduce_scatter(reduce.parts, 1, kReduce)->wait();
    // (n - 1) / n of the full buffer, which has n shards.
    EXPECT_EQ(communicator->stats().all_gather_bytes, (communicator->size() - 1) * shard_bytes);
    EXPECT_EQ(communicator->stats().reduce_scatter_bytes, (communicator->size() - 1) * shard_bytes);
    EXPECT_EQ(communicator->stats().all_gathers, 1);
    EXPECT_EQ(communicator->stats().reduce_scatters, 1);
    EXPECT_EQ(communicator->stats().control_bytes, 0);
    communicator->reset_stats();
    EXPECT_EQ(communicator->stats().all_gathers, 0);
  });
}

TEST_P(PairwiseCommunicatorOfSize, ScattersFromAnyRank) {
  run_ranks(GetParam(), [](int rank) {
    const auto communicator = world();
    for (int root = 0; root < communicator->size(); ++root) {
      for (const bool alias : {false, true}) {
        communicator->reset_stats();
        Scatter scatter(*communicator, kMixed, 20 + root, root, alias);
        const auto pending = communicator->scatter(scatter.parts, root, kScatter);
        pending->wait();
        pending->wait();  // Idempotent.
        scatter.check();
        std::int64_t bytes = 0;
        for (const auto& part : scatter.parts) {
          for (std::size_t r = 0; r < part.shards.size(); ++r) {
            if (static_cast<int>(r) != rank) bytes += static_cast<std::int64_t>(part.shards[r].nbytes());
          }
        }
        EXPECT_EQ(communicator->stats().scatter_bytes, bytes);  // Only the root has shards.
        EXPECT_EQ(communicator->stats().scatters, 1);
      }
    }
  });
}

TEST_P(PairwiseCommunicatorOfSize, ManyCollectivesMayBeInFlight) {
  run_ranks(GetParam(), [](int) {
    const auto communicator = world();
    check_many_in_flight(*communicator, *communicator, 20, at::kBFloat16, true);
  });
}

TEST_P(PairwiseCommunicatorOfSize, APendingThatIsDroppedStillServesThePeers) {
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

INSTANTIATE_TEST_SUITE_P(Ranks, PairwiseCommunicatorOfSize, ::testing::Values(1, 2, 3, 4));

TEST(PairwiseCommunicator, OutMayBeItsOwnRegionOfUnreduced) {
  run_ranks(3, [](int rank) {
    const auto communicator = world();
    Reduce reduce(*communicator, {{.numel = 1000, .dtype = at::kFloat}}, 4, 0.25);
    reduce.parts[0].out = reduce.parts[0].unreduced.narrow(0, rank * 1000, 1000);
    communicator->reduce_scatter(reduce.parts, 0.25, kReduce)->wait();
    reduce.check();
  });
}

// With peers, who may wait for it, a collective that fails on one rank ends them all. Alone, it is only the operator's own error.
TEST(PairwiseCommunicator, AnOperatorThatFailsWithoutPeersEndsNothing) {
  run_ranks(1, [] {
    const auto communicator = world();
    int failed = 0;
    for (bool ended = false; !ended; failed += ended ? 0 : 1) {
      Reduce reduce(*communicator, {{.numel = 1000, .dtype = at::kFloat}, {.numel = 3, .dtype = at::kFloat}}, 1, 0.25);
      try {
        const testing::FailingOperator operators;
        testing::FailingOperator::arm(failed);
        communicator->reduce_scatter(reduce.parts, 0.25, kReduce)->wait();
        ended = true;
      } catch (const std::runtime_error& error) {
        EXPECT_STREQ(error.what(), "planned failure");
      }
      if (ended) reduce.check();
    }
    EXPECT_GT(failed, 0);
  });
}

TEST(PairwiseCommunicator, PiecesThatDoNotFitAreRefused) {
  run_ranks(2, [] {
    const auto communicator = world();
    const at::Tensor four = torch::zeros({4});
    const auto gather = [&](const at::Tensor& full, const at::Tensor& shard) {
      const GatherPart part{.full = full, .shard = shard};
      communicator->all_gather({&part, 1}, kGather);
    };
    EXPECT_THROW(gather(four, torch::zeros({3})), Error);
    EXPECT_THROW(gather(four, torch::zeros({2}, at::kHalf)), Error);
    EXPECT_THROW(gather(torch::zeros({8}).slice(0, 0, 8, 2), torch::zeros({2})), Error);
    const auto reduce = [&](const at::Tensor& unreduced, const at::Tensor& staging, const at::Tensor& out) {
      const ReducePart part{.unreduced = unreduced, .staging = staging, .out = out};
      communicator->reduce_scatter({&part, 1}, 1, kReduce);
    };
    EXPECT_THROW(reduce(four, torch::zeros({1}), torch::zeros({2})), Error);
    EXPECT_THROW(reduce(four, torch::zeros({2}, at::kHalf), torch::zeros({2})), Error);
    EXPECT_THROW(reduce(four.to(at::kLong), torch::zeros({2}, at::kLong), torch::zeros({2})), Error);
    const auto scatter = [&](const std::vector<at::Tensor>& shards, const at::Tensor& into) {
      const ScatterPart part{.shards = shards, .into = into};
      communicator->scatter({&part, 1}, communicator->rank(), kScatter);
    };
    EXPECT_THROW(scatter({four, four}, torch::zeros({3})), Error);
    EXPECT_THROW(scatter({four}, torch::zeros({4})), Error);
    EXPECT_THROW(scatter({four, four}, torch::zeros({4}, at::kHalf)), Error);
    EXPECT_THROW(scatter({torch::zeros({8}).slice(0, 0, 8, 2), four}, torch::zeros({4})), Error);
    EXPECT_THROW(scatter({four, four}, torch::zeros({8}).slice(0, 0, 8, 2)), Error);
    communicator->barrier();  // Refused before anything was sent.
  });
}

}  // namespace pairwise_communicator_test
}  // namespace fsdp::comm
