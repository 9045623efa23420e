// Offload: main parameters, gradients and optimizer state lie in host memory, where the CPU updates them; the device holds what is being
// computed. On a GPU, give its name as an argument: offload cuda.

#include <fsdp/fsdp.h>
#include <torch/torch.h>

#include <cstdio>
#include <string>

int train(const std::string& device) {
  const auto mesh = fsdp::init_device_mesh(device, {{"dp_shard", -1}});
  torch::manual_seed(0);
  torch::nn::Sequential model(torch::nn::Linear(8, 64), torch::nn::Tanh(), torch::nn::Linear(64, 1));
  model->to(mesh.device());
  const auto sharded =
      fsdp::fully_shard(*model, {.mesh = mesh, .units = fsdp::each<torch::nn::LinearImpl>(), .offload = fsdp::Offload::kAll});
  fsdp::AdamW optimizer(*model, {.lr = 1e-2});

  torch::manual_seed(1 + mesh.rank());
  for (int step = 1; step <= 50; ++step) {
    const auto x = torch::randn({16, 8}).to(mesh.device());
    const auto loss = torch::mse_loss(model->forward(x), x.sum(/*dim=*/1, /*keepdim=*/true));
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();

    const double mean = mesh.sum(loss.item<double>()) / static_cast<double>(mesh.size());
    if (mesh.rank() == 0 && step % 10 == 0) std::printf("step %d  loss %.4f\n", step, mean);
  }
  const auto memory = sharded.memory_stats();
  if (mesh.rank() == 0) {
    std::printf("bytes between steps: %lld on the device, %lld of the host\n", static_cast<long long>(memory.total.live),
                static_cast<long long>(memory.host.live));
  }
  return 0;
}

int main(int argc, char** argv) {
  const std::string device = argc > 1 ? argv[1] : "cpu";
  return fsdp::launch_local(2, [&] { return train(device); });
}
