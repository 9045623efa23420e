#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <memory>

#include "comm/collectives/native_communicator.h"
#include "fsdp/fsdp.h"
#include "host_clock.h"
#include "support/device_mesh.h"
#include "support/device_row.h"
#include "support/stack.h"
#include "support/temporary_folder.h"

// How long a step waits for what other ranks send, in the simulated time of the device: what it takes more than if that took no time.
namespace exposed_test {

using fsdp::testing::current_stream;
using fsdp::testing::device_mesh;
using fsdp::testing::make_stack;
using fsdp::testing::run_ranks_on_device;
using fsdp::testing::stack_input;
using fsdp::testing::stack_units;

constexpr std::uint64_t kCollective = 20'000;
constexpr sim::Cost kFree{.launch = 100, .kernel = 5'000, .kernel_byte = 0.01};
constexpr sim::Cost kCost{.launch = 100, .kernel = 5'000, .collective = kCollective, .kernel_byte = 0.01, .collective_byte = 0.1};

/// The simulated time of a step's forward and backward.
std::uint64_t time_of_step(const fsdp::DeviceMesh& mesh, fsdp::FullyShardOptions options, const sim::Cost& cost) {
  const int rank = static_cast<int>(mesh.rank());
  sim::set_cost(cost);
  auto model = make_stack({.width = 64, .hidden = {64, 64, 64, 64, 64, 64}});
  model->to(mesh.device());
  options.mesh = mesh;
  options.units = stack_units();
  fsdp::fully_shard(*model, options);
  std::uint64_t begin = 0;
  for (int step = 0; step < 3; ++step) {
    const auto x = stack_input(step, rank).to(mesh.device());
    current_stream(rank).synchronize();
    begin = sim::now();
    model->forward(x).square().mean().backward();
    current_stream(rank).synchronize();
  }
  return sim::now() - begin;
}

/// In the time of a collective.
double exposed(const fsdp::DeviceMesh& mesh, const fsdp::FullyShardOptions& options = {}) {
  const auto with = time_of_step(mesh, options, kCost);
  const auto without = time_of_step(mesh, options, kFree);
  return (static_cast<double>(with) - static_cast<double>(without)) / static_cast<double>(kCollective);
}

// [Read ahead] What is left: the first gathers of the forward, and the last reductions of the backward, each of the root and a block.
TEST(ExposedCommunication, IsHiddenByPrefetching) {
  run_ranks_on_device(2, [] {
    const auto mesh = device_mesh({{"dp_shard", -1}});
    EXPECT_GT(exposed(mesh, {.prefetch_depth = 0}), 20);
    EXPECT_LT(exposed(mesh), 5);
  });
}

// [Hops start together] The last reductions of the backward have three hops.
TEST(ExposedCommunication, OfReplicasIsHidden) {
  run_ranks_on_device(4, [] {
    const auto mesh = device_mesh({{"dp_replicate", 2}, {"dp_shard", 2}});
    EXPECT_LT(exposed(mesh), 12);
  });
}

// Gradients in bfloat16, between hosts of three ranks: what is sent between the levels has been summed beside the computation.
TEST(ExposedCommunication, OfTwoLevelsIsHidden) {
  constexpr int kRanks = 6;
  constexpr int kPerHost = 3;
  const fsdp::testing::TemporaryFolder folder;
  run_ranks_on_device(kRanks, [&](int rank) {
    fsdp::testing::OfAllRanks all(folder, rank, kRanks);
    const auto mesh = fsdp::testing::mesh_over(
        std::make_shared<fsdp::comm::NativeCommunicator>(all.row, all.backend, all.rendezvous.gloo_group(all.row, "control"), kPerHost));
    const fsdp::FullyShardOptions options{.mixed_precision = fsdp::MixedPrecisionPolicy{.grad_comm_dtype = at::kBFloat16}};
    EXPECT_LT(exposed(mesh, options), 11);
  });
}

}  // namespace exposed_test
