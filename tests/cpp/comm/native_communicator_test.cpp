#include "comm/native_communicator.h"

#include <memory>

#include "comm/pairwise_communicator.h"
#include "comm/rendezvous.h"
#include "support/collective_checks.h"
#include "support/multi_rank.h"

namespace fsdp::comm {
namespace native_communicator_test {

using testing::Gather;
using testing::kGather;
using testing::kReduce;
using testing::kScatter;
using testing::PieceShape;
using testing::Reduce;
using testing::run_ranks;
using testing::Scatter;

// Over Gloo, which has the same native collectives as NCCL.
std::unique_ptr<NativeCommunicator> native_world() {
  const World world = read_world(process_environment);
  Row row{.dim = "dp_shard", .rank = world.rank, .global_ranks = {}, .world_size = world.size};
  for (int rank = 0; rank < world.size; ++rank) row.global_ranks.push_back(rank);
  Rendezvous rendezvous(world, "test", std::chrono::seconds(30));
  auto backend = rendezvous.gloo_group(row, "data");
  auto control = rendezvous.gloo_group(row, "control");
  auto communicator = std::make_unique<NativeCommunicator>(row, std::move(backend), std::move(control));
  communicator->barrier();
  return communicator;
}

// The backend's own sums of two ranks are exact whatever their order, as a + b is b + a.
const std::vector<PieceShape> kSummedByBackend = {{.numel = 33, .dtype = at::kFloat},
                                                  {.numel = 0, .dtype = at::kFloat},
                                                  {.numel = 65, .dtype = at::kFloat, .out_dtype = at::kFloat, .accumulate = true}};
const std::vector<PieceShape> kSummedHere = {{.numel = 33, .dtype = at::kBFloat16},
                                             {.numel = 64, .dtype = at::kHalf, .out_dtype = at::kHalf},
                                             {.numel = 0, .dtype = at::kHalf},
                                             {.numel = 1000, .dtype = at::kBFloat16, .out_dtype = at::kFloat, .accumulate = true}};

class NativeCommunicatorOfSize : public ::testing::TestWithParam<int> {};

TEST_P(NativeCommunicatorOfSize, AllGathers) {
  run_ranks(GetParam(), [] {
    const auto communicator = native_world();
    for (const auto& shapes : {kSummedByBackend, kSummedHere}) {
      for (const bool alias : {false, true}) {
        Gather gather(*communicator, shapes, 7, alias);
        communicator->all_gather(gather.pieces, kGather)->wait();
        gather.check();
      }
      Gather single(*communicator, {shapes[0]}, 8, false);
      communicator->all_gather(single.pieces, kGather)->wait();
      single.check();
    }
  });
}

TEST_P(NativeCommunicatorOfSize, ScattersFromAnyRank) {
  run_ranks(GetParam(), [] {
    const auto communicator = native_world();
    for (int root = 0; root < communicator->size(); ++root) {
      Scatter scatter(*communicator, kSummedHere, 30, root, false);
      communicator->scatter(scatter.pieces, root, kScatter)->wait();
      scatter.check();
    }
  });
}

TEST_P(NativeCommunicatorOfSize, SumsNarrowDtypesInRankOrder) {
  run_ranks(GetParam(), [] {
    const auto communicator = native_world();
    Reduce reduce(*communicator, kSummedHere, 9, 1.0 / 3);
    communicator->reduce_scatter(reduce.pieces, 1.0 / 3, kReduce)->wait();
    reduce.check();
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, NativeCommunicatorOfSize, ::testing::Values(1, 2, 3));

TEST(NativeCommunicator, LetsTheBackendSumWideDtypes) {
  run_ranks(2, [] {
    const auto communicator = native_world();
    Reduce reduce(*communicator, kSummedByBackend, 10, 0.25);
    communicator->reduce_scatter(reduce.pieces, 0.25, kReduce)->wait();
    reduce.check();
    Reduce single(*communicator, {kSummedByBackend[0]}, 11, 0.25);
    communicator->reduce_scatter(single.pieces, 0.25, kReduce)->wait();
    single.check();
  });
}

TEST(NativeCommunicator, NeedsLittleStagingWhereTheBackendSums) {
  run_ranks(3, [] {
    const auto communicator = native_world();
    EXPECT_EQ(communicator->staging_numel(10), 30);
    EXPECT_EQ(communicator->staging_numel(10, at::kFloat), 10);
    EXPECT_EQ(communicator->staging_numel(10, at::kBFloat16), 30);
  });
}

TEST(NativeCommunicator, CountsLikeThePairwiseOne) {
  run_ranks(3, [] {
    const auto communicator = native_world();
    communicator->reset_stats();
    Gather gather(*communicator, kSummedHere, 7, false);
    communicator->all_gather(gather.pieces, kGather)->wait();
    EXPECT_EQ(communicator->stats().all_gather_bytes, 2 * 2 * (33 + 64 + 1000));
    EXPECT_EQ(communicator->stats().all_gathers, 1);
  });
}

}  // namespace native_communicator_test
}  // namespace fsdp::comm
