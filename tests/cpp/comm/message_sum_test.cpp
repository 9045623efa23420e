#include "comm/collectives/message_sum.h"

#include <algorithm>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <vector>

#include "comm/collectives/native_communicator.h"
#include "comm/mesh/rendezvous.h"
#include "comm/mesh/store_mesh.h"
#include "support/collective_checks.h"
#include "support/hosts.h"
#include "support/logging_device.h"
#include "support/multi_rank.h"
#include "support/native_world.h"
#include "support/temporary_folder.h"

namespace fsdp::comm {
namespace message_sum_test {

using testing::kReduce;
using testing::PieceShape;
using testing::Reduce;
using testing::run_ranks;

const std::vector<PieceShape> kNarrow = {
    {.numel = 33, .dtype = at::kBFloat16},
    {.numel = 0, .dtype = at::kHalf},
    {.numel = 129, .dtype = at::kHalf, .out_dtype = at::kHalf},
    {.numel = 5001, .dtype = at::kBFloat16, .out_dtype = at::kFloat, .accumulate = true},
};

struct Hosts {
  int count;
  int ranks;  ///< Of each.
  std::int64_t piece_staging = SumLevels::kPieceStaging;
};

class MessageSumOfHosts : public ::testing::TestWithParam<Hosts> {
 protected:
  /// fn(communicator, backend), on all ranks.
  template <typename Fn>
  static void run(const Fn& fn) {
    run_ranks(GetParam().count * GetParam().ranks, [&] {
      const auto world = testing::counting_world(GetParam().ranks, GetParam().piece_staging);
      fn(*world.communicator, *world.backend);
    });
  }
};

/// The sum over the hosts' sums.
at::Tensor expected_sum_of(const std::vector<at::Tensor>& sources, const at::Tensor& old, int ranks, double scale, bool accumulate) {
  std::vector<at::Tensor> of_hosts;
  for (auto first = sources.begin(); first != sources.end(); first += ranks) {
    of_hosts.push_back(testing::expected_sum({first, first + ranks}, at::zeros({old.numel()}, at::kFloat), {}));
  }
  return testing::expected_sum(of_hosts, old, {.scale = scale, .accumulate = accumulate});
}

TEST_P(MessageSumOfHosts, AddsUpInTheOrderOfTheHosts) {
  run([](NativeCommunicator& communicator, const testing::CountingBackend&) {
    const int ranks = GetParam().ranks;
    Reduce reduce(communicator, kNarrow, 9, 1.0 / 3);
    for (std::size_t i = 0; i < kNarrow.size(); ++i) {
      const auto& part = reduce.parts[i];
      const auto numel = part.out.numel();
      if (numel == 0) continue;
      std::vector<at::Tensor> sources;
      for (int rank = 0; rank < communicator.size(); ++rank) {
        const auto seed = 9 + 1000 * static_cast<std::int64_t>(i) + rank;
        const auto of_rank = testing::numbers(communicator.size() * numel, seed, part.unreduced.scalar_type());
        sources.push_back(of_rank.narrow(0, communicator.rank() * numel, numel));
      }
      const auto expected = expected_sum_of(sources, part.out, ranks, 1.0 / 3, part.accumulate);
      // One level gives the same bits.
      if (ranks == 4) {
        EXPECT_TRUE(testing::same_bits(expected, reduce.expected[i])) << "part " << i;
      }
      reduce.expected[i] = expected;
    }
    const auto pending = communicator.reduce_scatter(reduce.parts, 1.0 / 3, kReduce);
    pending->wait();
    pending->wait();  // Accumulates once.
    reduce.check();
  });
}

TEST_P(MessageSumOfHosts, EveryByteCrossesOncePerHost) {
  run([](NativeCommunicator& communicator, const testing::CountingBackend& backend) {
    const auto [hosts, ranks, piece_staging] = GetParam();
    communicator.reset_stats();
    Reduce narrow(communicator, kNarrow, 9, 1);
    communicator.reduce_scatter(narrow.parts, 1, kReduce)->wait();
    const std::int64_t elements = 33 + 129 + 5001;
    std::int64_t all = 0;
    for (int peer = 0; peer < communicator.size(); ++peer) {
      const bool is_neighbour = peer / ranks == communicator.rank() / ranks && peer != communicator.rank();
      const bool is_equal = peer % ranks == communicator.rank() % ranks && peer != communicator.rank();
      const std::int64_t expected = is_neighbour ? 2 * hosts * elements : is_equal ? 4 * elements : 0;
      EXPECT_EQ(backend.sent[static_cast<std::size_t>(peer)], expected) << "to rank " << peer;
      all += expected;
    }
    EXPECT_EQ(communicator.stats().reduce_scatter_bytes, all);
    EXPECT_EQ(communicator.stats().shared_memory_bytes, 0);
  });
}

// Nothing is summed here then, and one level is enough.
TEST_P(MessageSumOfHosts, EmptyPartsNeedNoMessages) {
  run([](NativeCommunicator& communicator, const testing::CountingBackend& backend) {
    Reduce reduce(communicator, {{.numel = 0, .dtype = at::kBFloat16}, {.numel = 65, .dtype = at::kFloat}}, 9, 0.5);
    reduce.parts[1].unreduced.fill_(1);
    communicator.reduce_scatter(reduce.parts, 0.5, kReduce)->wait();
    EXPECT_TRUE(reduce.parts[1].out.eq(0.5 * communicator.size()).all().item<bool>());
    EXPECT_EQ(backend.sent, std::vector<std::int64_t>(static_cast<std::size_t>(communicator.size()), 0));
  });
}

// What the backend sums has one level, in the same collective.
TEST_P(MessageSumOfHosts, GoesBesideTheSumsOfTheBackend) {
  run([](NativeCommunicator& communicator, const testing::CountingBackend&) {
    const auto [hosts, ranks, piece_staging] = GetParam();
    communicator.reset_stats();
    std::vector<PieceShape> shapes = {kNarrow[0], {.numel = 65, .dtype = at::kFloat}, kNarrow[2], {.numel = 7, .dtype = at::kDouble}};
    Reduce reduce(communicator, shapes, 9, 0.5);
    for (auto& part : reduce.parts) part.unreduced.fill_(1);
    communicator.reduce_scatter(reduce.parts, 0.5, kReduce)->wait();
    for (const auto& part : reduce.parts) EXPECT_TRUE(part.out.eq(0.5 * communicator.size()).all().item<bool>());
    const std::int64_t wide = (hosts * ranks - 1) * (65 * 4 + 7 * 8);
    EXPECT_EQ(communicator.stats().reduce_scatter_bytes, wide + (33 + 129) * (2 * (ranks - 1) * hosts + 4 * (hosts - 1)));
    Reduce single(communicator, {shapes[1]}, 9, 0.5);
    single.parts[0].unreduced.fill_(3);
    communicator.reduce_scatter(single.parts, 0.5, kReduce)->wait();
    EXPECT_TRUE(single.parts[0].out.eq(1.5 * communicator.size()).all().item<bool>());
  });
}

TEST_P(MessageSumOfHosts, SeveralMayBeInFlight) {
  run([](NativeCommunicator& communicator, const testing::CountingBackend&) {
    std::vector<Reduce> reduces;
    std::vector<std::unique_ptr<Pending>> pending;
    for (int i = 0; i < 3; ++i) {
      auto& reduce = reduces.emplace_back(communicator, kNarrow, 9 + i, 1);
      for (auto& part : reduce.parts) part.unreduced.fill_(i + 1);
      for (auto& part : reduce.parts) part.accumulate = false;
      pending.push_back(communicator.reduce_scatter(reduce.parts, 1, kReduce));
    }
    // Each rank waits in another order.
    for (int i = 0; i < 3; ++i) pending[static_cast<std::size_t>((i + communicator.rank()) % 3)]->wait();
    for (int i = 0; i < 3; ++i) {
      for (const auto& part : reduces[static_cast<std::size_t>(i)].parts) {
        EXPECT_TRUE(part.out.eq((i + 1) * communicator.size()).all().item<bool>());
      }
    }
  });
}

TEST_P(MessageSumOfHosts, StagingHasRoomForWhatIsReceivedAndForSums) {
  run([](NativeCommunicator& communicator, const testing::CountingBackend&) {
    const auto [hosts, ranks, piece_staging] = GetParam();
    const std::int64_t of_each = hosts == 1 ? ranks - 1 : 2 * hosts + std::max((ranks - 1) * hosts, 2 * (hosts - 1));
    EXPECT_EQ(communicator.staging_numel(10, at::kBFloat16), 10 * of_each);
    EXPECT_EQ(communicator.staging_numel(10), 10 * of_each);
    EXPECT_EQ(communicator.staging_numel(10, at::kFloat), 10);
    // Two pieces of a large shard.
    const std::int64_t large = communicator.staging_numel(std::int64_t{1} << 40, at::kBFloat16);
    EXPECT_LE(large, 2 * piece_staging);
    EXPECT_GT(large, piece_staging);
  });
}

INSTANTIATE_TEST_SUITE_P(Shapes, MessageSumOfHosts,
                         ::testing::Values(Hosts{2, 4}, Hosts{3, 3}, Hosts{1, 2}, Hosts{1, 3}, Hosts{2, 4, 2000}, Hosts{3, 3, 2000},
                                           Hosts{1, 2, 2000}, Hosts{1, 3, 2000}),
                         [](const auto& info) {
                           const Hosts& hosts = info.param;
                           return std::to_string(hosts.count) + "x" + std::to_string(hosts.ranks) +
                                  (hosts.piece_staging < SumLevels::kPieceStaging ? "InPieces" : "");
                         });

TEST(SumLevels, AreTwoWhereOneSendsMore) {
  for (const int ranks : {1, 2, 6}) EXPECT_FALSE(SumLevels::of(6, ranks).are_two()) << ranks;
  EXPECT_TRUE(SumLevels::of(6, 3).are_two());
}

TEST(SumLevels, PiecesAreOfLargeShardsAndNotTooSmall) {
  const SumLevels eight{.ranks = 8, .piece_staging = 7 * 1600};
  EXPECT_EQ(eight.piece_numel(3200), 3200);
  EXPECT_EQ(eight.piece_numel(3201), 1600);
  EXPECT_EQ(eight.staging_numel(3200), 7 * 3200);
  EXPECT_EQ(eight.staging_numel(3201), 7 * 3200);
  const SumLevels many{.ranks = 8, .hosts = 2048, .piece_staging = 512 * 64};
  EXPECT_EQ(many.piece_numel(1000), 64) << "a message has some length";
  EXPECT_EQ((SumLevels{.ranks = 1}).staging_numel(1000), 0);
}

// The rows of two hosts, and behind them the neighbours' gradients or what the hosts send each other.
TEST(SumLevels, OfRoundedContributionsHavePiecesOfBlocks) {
  EXPECT_EQ(SumLevels::of_rounded(6, 3).hosts, 2);
  EXPECT_EQ(SumLevels::of_rounded(4, 2).hosts, 2);
  EXPECT_EQ(SumLevels::of_rounded(6, 1).hosts, 6);
  EXPECT_EQ(SumLevels::of_rounded(6, 6).hosts, 6) << "on one host, each rank rounds";
  const GradCommFormat format{.bits = 8, .block = 128};
  const SumLevels levels{.ranks = 2, .hosts = 2, .piece_staging = 5 * 1024};
  EXPECT_EQ(levels.rounded_piece_bytes(1000, format, at::kBFloat16), 2 * 1000 * 4 + 2 * 1000 * 2);
  const SumLevels flat{.ranks = 1, .hosts = 2, .piece_staging = 5 * 1024};
  EXPECT_EQ(flat.rounded_piece_bytes(1000, format, at::kFloat), (2 * 1000 * 4 + 2 * (7 * 132 + 108) + 15) / 16 * 16);
  // Of a block: 1,024 bytes of rows, and 512 of gradients.
  EXPECT_EQ(levels.rounded_piece_numel(12 * 128, format, at::kBFloat16), 12 * 128);
  EXPECT_EQ(levels.rounded_piece_numel(12 * 128 + 1, format, at::kBFloat16), 6 * 128);
  EXPECT_EQ(levels.rounded_staging_bytes(12 * 128 + 1, format, at::kBFloat16), 12 * 1536);
  EXPECT_EQ(levels.rounded_piece_numel(100'000, {.block = 8192}, at::kFloat), 8192) << "at least a block";
  EXPECT_EQ((SumLevels{.ranks = 4}).rounded_staging_bytes(1000, format, at::kFloat), 0) << "nobody to send to";
}

TEST(MessageSum, SumsRunOnOneStreamBehindTheCurrentOne) {
  const testing::LoggingDevice device;
  const Row row{.dim = "dp_shard", .rank = 0, .global_ranks = {0, 1, 2, 3, 4, 5}, .world_size = 6};
  MessageSum sum(row, nullptr, {.ranks = 3, .hosts = 2});
  const auto stream = sum.stream_behind_current(device.device());
  EXPECT_EQ(device.take_events(), (std::vector<std::string>{"pool gives 100", "record on 0", "block 100"}));
  EXPECT_EQ(sum.stream_behind_current(device.device()), stream);
  EXPECT_EQ(device.take_events(), (std::vector<std::string>{"record on 0", "block 100"}));
  sum.rejoin();
  EXPECT_EQ(device.take_events(), (std::vector<std::string>{"record on 100", "block 0"}));
}

/// The bfloat16 elements of staging for one of a shard, in a mesh whose tensors are moved by a backend of the caller's.
std::int64_t staging_of_mesh(int rank, const std::string& file) {
  const auto store = c10::make_intrusive<c10d::FileStore>(file, 6);
  StoreMesh options{.store = store, .prefix = "mesh", .rank = rank, .world_size = 6, .dims = {"dp_shard"}, .rows = {{0, 1, 2, 3, 4, 5}}};
  options.backend_of = [&](std::size_t, std::int64_t) {
    Rendezvous rendezvous(store, rank, 6, "data", std::chrono::seconds(30));
    return rendezvous.gloo_group({.dim = "dp_shard", .rank = rank, .global_ranks = {0, 1, 2, 3, 4, 5}, .world_size = 6}, "data");
  };
  const auto mesh = make_store_mesh(options);
  const auto communicator = mesh.communicator("dp_shard");
  Reduce reduce(*communicator, kNarrow, 9, 1);
  for (auto& part : reduce.parts) part.unreduced.fill_(1);
  for (auto& part : reduce.parts) part.accumulate = false;
  communicator->reduce_scatter(reduce.parts, 1, kReduce)->wait();
  for (const auto& part : reduce.parts) EXPECT_TRUE(part.out.eq(6).all().item<bool>());
  return communicator->staging_numel(1, at::kBFloat16);
}

TEST(MessageSum, AMeshTakesItBetweenHosts) {
  if (!testing::can_pretend_hosts()) GTEST_SKIP() << "this system refuses mount namespaces";
  for (const bool several : {true, false}) {
    const testing::TemporaryFolder folder;
    run_ranks(6, [&](int rank) {
      if (several) testing::pretend_hosts(rank, 3);
      EXPECT_EQ(staging_of_mesh(rank, folder.path() / "store"), several ? 8 : 5);
    });
  }
}

}  // namespace message_sum_test
}  // namespace fsdp::comm
