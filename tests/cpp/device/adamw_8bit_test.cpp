#include "fsdp/adamw_8bit.h"

#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "fsdp/fsdp.h"
#include "optim/adamw_8bit_step.h"
#include "optim/device_adamw.h"
#include "streams.h"
#include "support/collective_checks.h"
#include "support/device_mesh.h"
#include "support/on_device.h"

// AdamW with state of 8 bits on a device, by a kernel of ours.
namespace adamw_8bit_test {

using fsdp::optim::AdamStep;
using fsdp::optim::kBlock;
using fsdp::optim::QuantizedPiece;
using fsdp::testing::device_mesh;
using fsdp::testing::numbers;
using fsdp::testing::order;
using fsdp::testing::run_ranks_on_device;
using fsdp::testing::same_bits;
using fsdp::testing::side_stream;

using Kernels = std::map<std::string, std::int64_t>;

QuantizedPiece piece_of(const at::Tensor& value, at::ScalarType gradient_dtype) {
  const auto blocks = (value.numel() + kBlock - 1) / kBlock;
  const auto codes = value.options().dtype(at::kByte);
  return {.value = value,
          .gradient = at::zeros_like(value, value.options().dtype(gradient_dtype)),
          .state = {at::zeros({value.numel()}, codes), at::zeros({blocks}, codes.dtype(at::kFloat)), at::zeros({value.numel()}, codes),
                    at::zeros({blocks}, codes.dtype(at::kFloat))}};
}

TEST(DeviceAdamW8bit, HasTheBitsOfTheHost) {
  const AdamStep step{.lr = 0.05, .beta1 = 0.9, .beta2 = 0.99, .weight_decay = 0.1, .eps = 1e-6};
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const auto gradient_dtype : {at::kFloat, dtype}) {
      for (const std::int64_t numel : {1, 255, 256, 1000}) {
        const auto value = at::tanh(numbers(numel, 1, at::kDouble)).to(dtype);
        auto host = piece_of(value.clone(), gradient_dtype);
        auto device = piece_of(value.to(sim::device()), gradient_dtype);
        for (int steps = 1; steps < 5; ++steps) {
          host.gradient.copy_(at::tanh(numbers(numel, 10 + steps, at::kDouble)));
          device.gradient.copy_(host.gradient);
          fsdp::optim::step_adamw_8bit(host, step, steps);
          sim::reset_stats();
          fsdp::optim::step_adamw_8bit(device, step, steps);
          if (steps == 1) continue;  // The first one of all copies the maps there.
          EXPECT_EQ(sim::stats().kernels, (Kernels{{"fsdp::adamw_8bit", 1}}));
          EXPECT_EQ(sim::stats().all_host_waits(), 0);
        }
        EXPECT_TRUE(same_bits(device.value.cpu(), host.value)) << numel;
        for (std::size_t k = 0; k < 4; ++k) EXPECT_TRUE(same_bits(device.state[k].cpu(), host.state[k])) << numel << ", " << k;
      }
    }
  }
}

TEST(DeviceAdamW8bit, AStepThatNobodyOrderedIsReported) {
  auto piece = piece_of(at::ones({300}, sim::device()), at::kFloat);
  fsdp::optim::step_adamw_8bit(piece, {.lr = 0.1}, 1);
  const auto side = side_stream();
  {
    const c10::StreamGuard on_side(side);
    fsdp::optim::step_adamw_8bit(piece, {.lr = 0.1}, 2);
  }
  EXPECT_FALSE(sim::take_reports().empty());
  order(side, fsdp::testing::current_stream());
}

struct Model : torch::nn::Module {
  Model() : weight(register_parameter("weight", at::tanh(numbers(4096, 1, at::kDouble)).to(at::kFloat).view({16, 256}))) {}
  at::Tensor weight;
};

fsdp::FullyShardOptions in_blocks(const fsdp::DeviceMesh& mesh) {
  return {.mesh = mesh, .granularity = [](const std::string&, const at::Tensor&) { return fsdp::Granularity::blocks(256); }};
}

/// What some steps make of it.
at::Tensor trained(const fsdp::DeviceMesh& mesh) {
  Model model;
  model.to(mesh.device());
  auto handle = fsdp::fully_shard(model, in_blocks(mesh));
  fsdp::AdamW8bit optimizer(model, {.lr = 0.05, .min_8bit_size = 0});
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    (model.weight * numbers(4096, 5 + step, at::kFloat).view({16, 256}).to(mesh.device())).sum().backward();
    optimizer.step();
  }
  return handle.full_parameters().at(0).second.cpu();
}

TEST(DeviceAdamW8bit, TrainsAsOnTheHost) {
  run_ranks_on_device(2, [] {
    const auto expected = trained(fsdp::init_device_mesh("cpu", {{"dp_shard", -1}}));
    EXPECT_TRUE(same_bits(trained(device_mesh({{"dp_shard", -1}})), expected));
  });
}

TEST(DeviceAdamW8bit, NeedsAKernel) {
  run_ranks_on_device(1, [] {
    auto* const before = fsdp::optim::device_adamw_8bit().set(sim::kType, nullptr);
    const auto mesh = device_mesh({{"dp_shard", -1}});
    Model model;
    model.to(mesh.device());
    const auto handle = fsdp::fully_shard(model, in_blocks(mesh));
    try {
      fsdp::AdamW8bit(model, {.min_8bit_size = 0});
      FAIL() << "was not refused";
    } catch (const fsdp::Error& error) {
      EXPECT_NE(std::string(error.what()).find("this build of libfsdp has no kernel of it"), std::string::npos) << error.what();
    }
    fsdp::optim::device_adamw_8bit().set(sim::kType, before);
  });
}

}  // namespace adamw_8bit_test
