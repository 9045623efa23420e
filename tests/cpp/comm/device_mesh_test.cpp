#include "fsdp/device_mesh.h"

#include <poll.h>
#include <torch/torch.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "comm/communicator.h"
#include "fsdp/error.h"
#include "support/messages.h"
#include "support/multi_rank.h"

namespace fsdp {
namespace device_mesh_test {

using testing::has;
using testing::message_of;

// The global ranks of a communicator, as its own messages tell them.
std::vector<std::int64_t> members(const DeviceMesh& mesh, comm::Communicator& communicator) {
  const auto all = communicator.exchange(torch::tensor({mesh.rank()}), {.operation = "members", .unit = {}});
  return {all.const_data_ptr<std::int64_t>(), all.const_data_ptr<std::int64_t>() + all.numel()};
}

std::vector<std::int64_t> members(const DeviceMesh& mesh, const std::string& dim) { return members(mesh, *mesh.communicator(dim)); }

TEST(DeviceMesh, OneProcessNeedsNoLauncher) {
  const auto mesh = init_device_mesh("cpu", {{"dp_shard", -1}});
  EXPECT_TRUE(mesh.defined());
  EXPECT_EQ(mesh.size(), 1);
  EXPECT_EQ(mesh.rank(), 0);
  EXPECT_EQ(mesh.coordinate("dp_shard"), 0);
  EXPECT_TRUE(mesh.device().is_cpu());
  mesh.barrier();
  EXPECT_EQ(members(mesh, "dp_shard"), std::vector<std::int64_t>{0});
  EXPECT_TRUE(comm::is_single_threaded());  // No group, no store.
}

TEST(DeviceMesh, UndefinedMeshSaysSo) {
  const DeviceMesh mesh;
  EXPECT_FALSE(mesh.defined());
  EXPECT_TRUE(has(message_of([&] { mesh.barrier(); }), "undefined"));
}

TEST(DeviceMesh, NeighboursAreThoseAroundARank) {
  testing::run_ranks(4, [](int rank) {
    const auto mesh = init_device_mesh("cpu", {{"dp_shard", 4}});
    const auto neighbours = mesh.new_communicator("dp_shard", 2);
    EXPECT_EQ(neighbours->rank(), rank % 2);
    const std::int64_t first = rank / 2 * 2;
    EXPECT_EQ(members(mesh, *neighbours), (std::vector<std::int64_t>{first, first + 1}));
    EXPECT_TRUE(has(message_of([&] { mesh.new_communicator("dp_shard", 3); }), "3 neighbours do not divide"));
  });
}

TEST(DeviceMesh, RowsOfATwoDimensionalMesh) {
  testing::run_ranks(4, [](int rank) {
    const auto mesh = init_device_mesh("cpu", {{"dp_outer", 2}, {"dp_shard", -1}});
    EXPECT_EQ(mesh.rank(), rank);
    EXPECT_EQ(mesh.size(), 4);
    EXPECT_EQ(mesh.size("dp_outer"), 2);
    EXPECT_EQ(mesh.size("dp_shard"), 2);
    EXPECT_EQ(mesh.coordinate("dp_outer"), rank / 2);
    EXPECT_EQ(mesh.coordinate("dp_shard"), rank % 2);
    const std::int64_t row = rank / 2 * 2;
    EXPECT_EQ(members(mesh, "dp_shard"), (std::vector<std::int64_t>{row, row + 1}));
    EXPECT_EQ(members(mesh, "dp_outer"), (std::vector<std::int64_t>{rank % 2, rank % 2 + 2}));
    EXPECT_EQ(mesh.communicator("dp_outer")->rank(), rank / 2);
    EXPECT_EQ(mesh.sum(1 << rank), 0b1111);
    mesh.barrier();

    const auto inner = mesh["dp_shard"];
    EXPECT_EQ(inner.dims().size(), 1u);
    EXPECT_EQ(inner.rank(), rank);
    EXPECT_EQ(inner.size(), 2);
    EXPECT_EQ(inner.coordinate("dp_shard"), rank % 2);
    EXPECT_EQ(inner.communicator("dp_shard"), mesh.communicator("dp_shard"));
  });
}

TEST(DeviceMesh, RowsOfAThreeDimensionalMesh) {
  testing::run_ranks(4, [](int rank) {
    const auto mesh = init_device_mesh("cpu", {{"a", 2}, {"b", 1}, {"c", 2}});
    EXPECT_EQ(members(mesh, "b"), (std::vector<std::int64_t>{rank}));
    EXPECT_EQ(members(mesh, "a"), (std::vector<std::int64_t>{rank % 2, rank % 2 + 2}));
  });
}

TEST(DeviceMesh, SeveralMeshesLiveAndDieInOneProcess) {
  testing::run_ranks(2, [](int rank) {
    const auto first = init_device_mesh("cpu", {{"dp_shard", -1}});
    for (int i = 0; i < 3; ++i) {
      const auto other = init_device_mesh("cpu", {{"dp_shard", -1}});
      EXPECT_EQ(members(other, "dp_shard").size(), 2u);
    }
    EXPECT_EQ(members(first, "dp_shard").size(), 2u);
  });
}

TEST(DeviceMesh, ACommunicatorOutlivesItsMesh) {
  testing::run_ranks(2, [] {
    const auto communicator = init_device_mesh("cpu", {{"dp_shard", -1}}).communicator("dp_shard");
    communicator->barrier();
  });
}

TEST(DeviceMesh, BarrierWaitsForEveryRankOfTheGrid) {
  int flag[2];
  ASSERT_EQ(pipe(flag), 0);
  testing::run_ranks(4, [&](int rank) {
    const auto mesh = init_device_mesh("cpu", {{"a", 2}, {"b", 2}});
    if (rank == 3) {
      usleep(300'000);
      ASSERT_EQ(write(flag[1], "xxx", 3), 3);  // One for each of the others, to be there when they get past the barrier.
    }
    mesh.barrier();
    if (rank == 3) return;
    pollfd ready = {.fd = flag[0], .events = POLLIN, .revents = 0};
    EXPECT_EQ(poll(&ready, 1, 0), 1) << "left the barrier before rank 3 came";
  });
  close(flag[0]);
  close(flag[1]);
}

TEST(DeviceMesh, AllIsTrueWhereAllRanksAgree) {
  const auto expect = [](const DeviceMesh& mesh) {
    EXPECT_TRUE(mesh.all(true));
    EXPECT_FALSE(mesh.all(false));
    for (int odd = 0; odd < mesh.size(); ++odd) EXPECT_FALSE(mesh.all(mesh.rank() != odd)) << "rank " << odd << " alone says no";
    for (int odd = 0; odd < mesh.size() && mesh.size() > 1; ++odd)
      EXPECT_FALSE(mesh.all(mesh.rank() == odd)) << "rank " << odd << " alone says yes";
  };
  expect(init_device_mesh("cpu", {{"dp_shard", -1}}));
  for (const int ranks : {2, 4}) {
    testing::run_ranks(ranks, [&] {
      expect(init_device_mesh("cpu", {{"dp_shard", -1}}));
      const auto plane = init_device_mesh("cpu", {{"dp_outer", 2}, {"dp_shard", -1}});
      expect(plane);
      // Only this part of the mesh is asked.
      EXPECT_EQ(plane["dp_shard"].all(plane.coordinate("dp_outer") == 0), plane.coordinate("dp_outer") == 0);
    });
  }
  EXPECT_TRUE(has(message_of([] { DeviceMesh().all(true); }), "undefined"));
}

// Where the order of additions shows: ((1 + 1e16) - 1e16) + 1.
TEST(DeviceMesh, SumsAreAddedInTheOrderOfTheRanks) {
  testing::run_ranks(4, [](int rank) {
    const std::vector<double> values = {1, 1e16, -1e16, 1};
    for (const auto& dims : {std::vector<MeshDim>{{"dp_shard", 4}}, {{"dp_outer", 2}, {"dp_shard", 2}}}) {
      EXPECT_EQ(init_device_mesh("cpu", dims).sum(values[static_cast<std::size_t>(rank)]), 1);
    }
  });
}

TEST(DeviceMesh, BadArgumentsAreExplained) {
  const auto init = [](std::vector<MeshDim> dims, const std::string& type = "cpu") {
    return message_of([&] { init_device_mesh(type, dims); });
  };
  EXPECT_TRUE(has(init({}), "at least one dimension"));
  EXPECT_TRUE(has(init({{"", 1}}), "has no name"));
  EXPECT_TRUE(has(init({{"a", 1}, {"a", 1}}), "two dimensions are named 'a'"));
  EXPECT_TRUE(has(init({{"a", -1}, {"b", -1}}), "only one size can be -1"));
  EXPECT_TRUE(has(init({{"a", 0}}), "the size of 'a' must be positive"));
  EXPECT_TRUE(has(init({{"a", 2}, {"b", 2}}), "mesh {a=2 x b=2} does not fit 1 rank"));
  EXPECT_TRUE(has(init({{"a", 2}, {"b", -1}}), "does not fit 1 rank"));
  EXPECT_TRUE(has(init({{"a", 1}}, "tpu"), "device type 'tpu'"));
  const auto mesh = init_device_mesh("cpu", {{"dp_shard", 1}});
  EXPECT_TRUE(has(message_of([&] { mesh.size("tp"); }), "mesh {dp_shard=1} has no dimension 'tp'"));
}

TEST(DeviceMesh, AMissingRankIsACommError) {
  testing::run_ranks(2, [](int rank) {
    if (rank == 1) return;
    try {
      init_device_mesh("cpu", {{"dp_shard", -1}}, {.timeout = std::chrono::seconds(1)});
      ADD_FAILURE() << "met a rank that is not there";
    } catch (const CommError& error) {
      EXPECT_TRUE(has(error.what(), "rank 0 of 2 could not meet the others at 127.0.0.1:")) << error.what();
    }
  });
}

TEST(NullDeviceMesh, HasAnySizeSeenFromAnyRank) {
  const auto mesh = null_device_mesh({{"dp_outer", 8}, {"dp_shard", 128}}, 1000);
  EXPECT_EQ(mesh.size(), 1024);
  EXPECT_EQ(mesh.rank(), 1000);
  EXPECT_EQ(mesh.coordinate("dp_outer"), 7);
  EXPECT_EQ(mesh.coordinate("dp_shard"), 104);
  EXPECT_EQ(mesh.communicator("dp_shard")->rank(), 104);
  EXPECT_EQ(mesh.communicator("dp_shard")->size(), 128);
  mesh.barrier();
  EXPECT_THROW(null_device_mesh({{"dp_shard", 4}}, 4), Error);
  EXPECT_THROW(null_device_mesh({{"dp_shard", -1}}), Error);
}

}  // namespace device_mesh_test
}  // namespace fsdp
