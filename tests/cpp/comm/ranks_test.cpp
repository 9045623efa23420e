#include "comm/mesh/ranks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <array>
#include <string>
#include <vector>

#include "fsdp/error.h"
#include "support/messages.h"
#include "support/multi_rank.h"

namespace fsdp::comm {
namespace ranks_test {

using testing::has;
using testing::message_of;
using testing::run_ranks;

const Label kLabel{.operation = "test", .unit = "(all)"};

DeviceMesh grid() { return init_device_mesh("cpu", {{"dp_outer", 2}, {"dp_shard", 2}}); }

TEST(Ranks, OfAMeshCountTheLastDimensionFastest) {
  run_ranks(4, [](int rank) {
    const auto mesh = grid();
    const Ranks ranks(mesh);
    EXPECT_EQ(ranks.size(), 4);
    EXPECT_EQ(ranks.index(), rank);
    const auto all = ranks.exchange(at::tensor({rank, 10 * rank}), kLabel);
    EXPECT_TRUE(at::equal(all, at::tensor({0, 0, 1, 10, 2, 20, 3, 30}).view({4, 2}))) << all;
  });
}

TEST(Ranks, OfRowsInAnotherOrder) {
  run_ranks(4, [](int rank) {
    const auto mesh = grid();
    const Ranks ranks({nullptr, mesh.communicator("dp_shard"), mesh.communicator("dp_outer")});
    EXPECT_EQ(ranks.index(), rank % 2 * 2 + rank / 2);
    EXPECT_TRUE(at::equal(ranks.exchange(at::tensor({rank}), kLabel).flatten(), at::tensor({0, 2, 1, 3})));
  });
}

TEST(Ranks, OfOneRowOnly) {
  run_ranks(4, [](int rank) {
    const auto mesh = grid();
    const Ranks row({mesh.communicator("dp_shard")});
    EXPECT_EQ(row.size(), 2);
    const int first = rank / 2 * 2;
    EXPECT_TRUE(at::equal(row.exchange(at::tensor({rank}), kLabel).flatten(), at::tensor({first, first + 1})));
  });
}

TEST(Ranks, TextsReachAllAndTheFirst) {
  run_ranks(4, [](int rank) {
    const auto mesh = grid();
    const Ranks turned({mesh.communicator("dp_shard"), mesh.communicator("dp_outer")});
    for (const auto& ranks : {Ranks(mesh), turned}) {
      const auto index = std::to_string(ranks.index());
      EXPECT_EQ(ranks.broadcast("of " + index, kLabel), "of 0");
      const auto all = ranks.gather(rank == 3 ? "" : "of " + index, kLabel);
      EXPECT_EQ(all, rank == 0 ? (std::vector<std::string>{"of 0", "of 1", "of 2", ""}) : std::vector<std::string>());
    }
  });
}

TEST(Ranks, UniteBits) {
  run_ranks(4, [](int rank) {
    std::array<std::uint8_t, 3> bits{};
    bits[static_cast<std::size_t>(rank) % 3] = static_cast<std::uint8_t>(1U << rank);
    Ranks(grid()).unite(bits, kLabel);
    EXPECT_EQ(bits, (std::array<std::uint8_t, 3>{0b1001, 0b10, 0b100}));
  });
}

TEST(Ranks, AgreeOnlyWhereAllDo) {
  run_ranks(4, [](int rank) {
    const Ranks ranks(grid());
    EXPECT_TRUE(ranks.agree(true, kLabel));
    for (int one = 0; one < 4; ++one) EXPECT_FALSE(ranks.agree(rank != one, kLabel)) << one;
  });
}

// A difference within one row is an error on the ranks of the other row, too.
TEST(Ranks, ADifferenceIsToldToAll) {
  run_ranks(4, [](int rank) {
    const Ranks ranks(grid());
    ranks.compare("same", kLabel);
    const auto message = message_of([&] { ranks.compare(rank == 3 ? "mine" : "same", kLabel); });
    EXPECT_TRUE(has(message, "same")) << message;
    EXPECT_TRUE(has(message, "mine")) << message;
    ranks.compare("usable again", kLabel);
  });
}

}  // namespace ranks_test
}  // namespace fsdp::comm
