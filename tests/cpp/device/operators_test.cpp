#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "support/on_device.h"

// ATen's operators on the device: the CPU's numbers, one kernel each.
namespace operators_test {

using sim::device;

torch::nn::Sequential mlp() {
  torch::manual_seed(1);
  return torch::nn::Sequential(torch::nn::Linear(16, 32), torch::nn::GELU(), torch::nn::LayerNorm(torch::nn::LayerNormOptions({32})),
                               torch::nn::Linear(32, 4));
}

void train_as_on_the_cpu() {
  auto on_cpu = mlp();
  auto on_device = mlp();
  on_device->to(device());
  torch::optim::AdamW cpu_optimizer(on_cpu->parameters());
  torch::optim::AdamW device_optimizer(on_device->parameters());
  const auto x = torch::randn({8, 16});
  for (int step = 0; step < 3; ++step) {
    on_cpu->forward(x).square().mean().backward();
    on_device->forward(x.to(device())).square().mean().backward();
    cpu_optimizer.step();
    device_optimizer.step();
    cpu_optimizer.zero_grad();
    device_optimizer.zero_grad();
  }
  for (std::size_t k = 0; k < on_cpu->parameters().size(); ++k) {
    EXPECT_TRUE(at::equal(on_cpu->parameters()[k], on_device->parameters()[k].cpu())) << k;
  }
}

TEST(DeviceOperators, TrainAsOnTheCpu) { fsdp::testing::run_ranks_on_device(1, train_as_on_the_cpu); }

TEST(DeviceOperators, AreOneKernelEach) {
  const std::vector<at::Tensor> list = {at::ones({10}, device()), at::ones({20}, device())};
  const auto x = at::ones({4, 8}, device());
  sim::reset_stats();
  at::_foreach_mul_(list, 2);
  at::layer_norm(x, {8});
  x.view({8, 4}).t().unsqueeze(0).detach();  // no kernel
  const std::map<std::string, std::int64_t> expected = {{"aten::_foreach_mul_", 1}, {"aten::native_layer_norm", 1}};
  EXPECT_EQ(sim::stats().kernels, expected);
  EXPECT_EQ(list[1].sum().item<float>(), 40);
}

// As CUDA's.
TEST(DeviceOperators, AreOneKernelForListsOfOneDtype) {
  using Kernels = std::map<std::string, std::int64_t>;
  const std::vector<at::Tensor> list = {at::ones({10}, device()), at::ones({2, 10}, device())};
  const std::vector<at::Tensor> half = {at::empty({10}, list[0].options().dtype(at::kBFloat16)),
                                        at::empty({2, 10}, list[0].options().dtype(at::kBFloat16))};
  const std::vector<at::Tensor> mixed = {at::ones({10}, half[0].options()), list[1]};
  const auto pinned = [](at::IntArrayRef sizes) { return at::full(sizes, 5, at::TensorOptions().pinned_memory(true)); };
  const std::vector<at::Tensor> of_the_host = {pinned({10}), pinned({2, 10})};
  sim::reset_stats();
  at::_foreach_copy_(half, list);
  EXPECT_EQ(sim::stats().kernels, (Kernels{{"aten::_foreach_copy_", 1}}));
  sim::reset_stats();
  at::_foreach_mul_(mixed, 3);
  at::_foreach_copy_(half, mixed);
  EXPECT_EQ(sim::stats().kernels, (Kernels{{"aten::mul", 2}, {"aten::copy_", 2}}));
  EXPECT_EQ(half[0].to(at::kFloat).sum().item<float>() + half[1].to(at::kFloat).sum().item<float>(), 3 * 30);
  const std::vector<at::Tensor> turned = {list[0], list[1].t()};
  const std::vector<at::Tensor> added = {at::ones({10}, device()), at::ones({10, 2}, device())};
  sim::reset_stats();
  at::_foreach_add_(turned, added);
  EXPECT_EQ(sim::stats().all_kernels(), 2) << "they lie differently";
  sim::reset_stats();
  at::_foreach_copy_(list, of_the_host, /*non_blocking=*/true);
  EXPECT_EQ(sim::stats().kernels, (Kernels{{"aten::copy_ from the host", 2}}));
  EXPECT_EQ(sim::stats().all_host_waits(), 0);
  EXPECT_EQ(list[1].sum().item<float>(), 100);
}

TEST(DeviceOperators, WriteGivenOutputs) {
  auto out = at::empty({0}, device());
  at::add_out(out, at::ones({3}, device()), at::ones({3}, device()));
  EXPECT_EQ(out.sum().item<float>(), 6);
}

TEST(DeviceOperators, RefuseTensorsOfTheHost) {
  const auto x = at::ones({3}, device());
  EXPECT_THROW(at::mul(x, at::ones({3})), c10::Error);
  EXPECT_EQ(at::mul(x, at::scalar_tensor(2)).sum().item<float>(), 6);
  EXPECT_THROW(at::mul(x, at::ones({3}, device(1))), c10::Error);
}

TEST(DeviceOperators, HaveRandomNumbers) {
  at::Generator(at::globalContext().defaultGenerator(device())).set_current_seed(7);
  const auto first = at::randn({100}, device()).cpu();
  at::Generator(at::globalContext().defaultGenerator(device())).set_current_seed(7);
  EXPECT_TRUE(at::equal(at::randn({100}, device()).cpu(), first));
  EXPECT_FALSE(at::equal(at::randn({100}, device()).cpu(), first));
}

}  // namespace operators_test
