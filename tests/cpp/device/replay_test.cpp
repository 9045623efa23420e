#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <set>
#include <string>

#include "fsdp/fsdp.h"
#include "fsdp/replay_check.h"
#include "replay/digest.h"
#include "support/device_mesh.h"
#include "support/stack.h"

// Checks of microbatches whose data are on a device.
namespace device_replay_test {

using fsdp::replay::digest;
using fsdp::replay::digests;
using fsdp::testing::device_mesh;
using fsdp::testing::make_stack;
using fsdp::testing::run_ranks_on_device;
using fsdp::testing::stack_input;
using fsdp::testing::stack_units;

TEST(DeviceReplay, EveryBitAndEachPieceCountsInADigest) {
  run_ranks_on_device(1, [] {
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kByte}) {
      const auto host = torch::arange(12, at::kFloat).to(dtype);
      const auto before = digests(host.to(sim::device(0)), 3);
      std::set<std::int64_t> seen = {digest(host.to(sim::device(0)))};
      const auto bits = static_cast<std::uint64_t>(host.nbytes()) * 8;
      auto* bytes = static_cast<std::uint8_t*>(host.mutable_data_ptr());
      for (std::uint64_t bit = 0; bit < bits; bit += 5) {
        bytes[bit / 8] ^= static_cast<std::uint8_t>(1U << (bit % 8));
        const auto now = digests(host.to(sim::device(0)), 3);
        for (std::uint64_t piece = 0; piece < 3; ++piece) EXPECT_EQ(now[piece] != before[piece], piece == bit / (bits / 3)) << bit;
        EXPECT_TRUE(seen.insert(digest(host.to(sim::device(0)))).second) << dtype << ", bit " << bit;
        bytes[bit / 8] ^= static_cast<std::uint8_t>(1U << (bit % 8));
      }
    }
  });
}

TEST(DeviceReplay, CleanStepsPassAndAWrongGradientIsNamed) {
  run_ranks_on_device(3, [](int rank) {
    auto model = make_stack();
    const auto mesh = device_mesh({{"dp_shard", -1}});
    model->to(mesh.device());
    fsdp::fully_shard(*model, {.mesh = mesh, .units = stack_units()});
    fsdp::AdamW optimizer(*model);
    fsdp::ReplayCheck check(*model, 1);
    bool is_wrong = false;
    model->blocks->at<fsdp::testing::StackBlockImpl>(2).down->weight.register_hook(
        [&](const at::Tensor& gradient) { return is_wrong ? gradient * 1.5 : gradient; });
    const fsdp::ReplayCheck::Microbatch microbatch = [&](const std::vector<at::Tensor>& batch) {
      model->forward(batch.front()).square().mean().backward();
    };
    for (int step = 0; step < 3; ++step) {
      check.run(microbatch, {stack_input(step, rank).to(mesh.device())});
      optimizer.step();
      optimizer.zero_grad();
      check.remember_parameters();
    }
    EXPECT_EQ(check.checked(), 3);
    is_wrong = rank == 1;
    std::string error;
    try {
      check.run(microbatch, {stack_input(3, rank).to(mesh.device())});
    } catch (const fsdp::Error& found) {
      error = found.what();
    }
    EXPECT_NE(error.find("gradients of unit 'blocks.2' from the batch of rank 0 are wrong on rank 1"), std::string::npos) << error;
  });
}

}  // namespace device_replay_test
