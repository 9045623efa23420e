#include "engine/buffer_pools.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <vector>

#include "comm/mesh/rendezvous.h"
#include "comm/mesh/store_mesh.h"
#include "engine/engine.h"
#include "fsdp/fsdp.h"
#include "support/meshes.h"
#include "support/multi_rank.h"
#include "support/stack.h"
#include "support/symmetric_allocator.h"
#include "support/temporary_folder.h"

namespace buffer_pools_test {

using fsdp::comm::BufferMemory;
using fsdp::testing::run_ranks;

/// Two ranks, whose tensors are moved by Gloo in the place of NCCL, in a group that has a name.
fsdp::DeviceMesh mesh_over_backend(int rank, const std::string& file) {
  const auto store = c10::make_intrusive<c10d::FileStore>(file, 2);
  fsdp::comm::StoreMesh options{.store = store, .prefix = "mesh", .rank = rank, .world_size = 2, .dims = {"dp_shard"}, .rows = {{0, 1}}};
  options.backend_of = [&](std::size_t, std::int64_t) {
    fsdp::comm::Rendezvous rendezvous(store, rank, 2, "data", std::chrono::seconds(30));
    auto backend = rendezvous.gloo_group({.dim = "dp_shard", .rank = rank, .global_ranks = {0, 1}, .world_size = 2}, "data");
    backend->setGroupUid("7");
    return backend;
  };
  return fsdp::comm::make_store_mesh(options);
}

struct Trained {
  explicit Trained(const fsdp::DeviceMesh& mesh)
      : model(fsdp::testing::make_stack({.hidden = {4, 5, 6}})),
        handle(fsdp::fully_shard(*model, {.mesh = mesh, .units = fsdp::testing::stack_units()})),
        optimizer(*model, fsdp::AdamWOptions{.lr = 1e-2}) {}

  double step(int rank) {
    const auto loss = fsdp::testing::stack_loss(model, steps++, rank);
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    return loss.item<double>();
  }

  fsdp::testing::Stack model;
  fsdp::FSDPModule handle;
  fsdp::AdamW optimizer;
  int steps = 0;
};

TEST(BufferPools, GathersGoIntoSymmetricMemoryInOneOrder) {
  const fsdp::testing::TemporaryFolder folder;
  run_ranks(2, [&](int rank) {
    Trained reference(fsdp::testing::line());
    const auto mesh = mesh_over_backend(rank, folder.path() / "store");
    Trained trained(mesh);
    const auto allocator = fsdp::testing::SymmetricAllocator::install();
    EXPECT_EQ(trained.step(rank), reference.step(rank));
    EXPECT_TRUE(allocator->allocated.empty());
    trained.handle.engine()->set({.buffer_memory = BufferMemory::kSymmetric});
    EXPECT_EQ(trained.handle.memory_stats().slots.live, 0);
    EXPECT_EQ(trained.step(rank), reference.step(rank));
    const auto blocks = allocator->allocated.size();
    EXPECT_GT(blocks, 1U);
    std::vector<std::int64_t> numbers;
    for (const auto& meeting : allocator->meetings) {
      EXPECT_EQ(meeting.group, "7");
      numbers.push_back(meeting.allocation);
    }
    EXPECT_GT(numbers.size(), 3U);
    const auto mine = torch::tensor(numbers);
    const auto all = mesh.communicator("dp_shard")->exchange(mine, {.operation = "exchange", .unit = "blocks"});
    EXPECT_TRUE(all[1 - rank].equal(mine));
    EXPECT_EQ(trained.step(rank), reference.step(rank));
    // Of gradients nothing lies there: the sums of the backend have their memory from the process.
    std::size_t bytes = 0;
    for (const std::size_t block : allocator->allocated) bytes += block;
    EXPECT_LT(static_cast<std::int64_t>(bytes), trained.handle.memory_stats().slots.peak);
    trained.handle.engine()->set({.buffer_memory = BufferMemory::kProcess});
    const auto meetings = allocator->meetings.size();
    EXPECT_EQ(trained.step(rank), reference.step(rank));
    EXPECT_EQ(allocator->meetings.size(), meetings);
    EXPECT_EQ(allocator->allocated.size(), blocks);
  });
}

}  // namespace buffer_pools_test
