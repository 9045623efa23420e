// The smallest program: a model, sharded over two ranks, learns to add.

#include <fsdp/fsdp.h>
#include <torch/torch.h>

#include <cstdio>

int train() {
  const auto mesh = fsdp::init_device_mesh("cpu", {{"dp_shard", -1}});  // all ranks, in a row

  torch::manual_seed(0);  // the same on every rank: each keeps its shards of its own values
  torch::nn::Sequential model(torch::nn::Linear(8, 64), torch::nn::Tanh(), torch::nn::Linear(64, 1));
  fsdp::fully_shard(*model, {.mesh = mesh, .units = fsdp::each<torch::nn::LinearImpl>()});
  fsdp::AdamW optimizer(*model, {.lr = 1e-2});

  torch::manual_seed(1 + mesh.rank());  // each rank draws its own part of the batch
  for (int step = 1; step <= 50; ++step) {
    const auto x = torch::randn({16, 8});
    const auto loss = torch::mse_loss(model->forward(x), x.sum(/*dim=*/1, /*keepdim=*/true));
    loss.backward();  // gradients are reduced to the shards
    optimizer.step();
    optimizer.zero_grad();

    const double mean = mesh.sum(loss.item<double>()) / static_cast<double>(mesh.size());
    if (mesh.rank() == 0 && step % 10 == 0) std::printf("step %d  loss %.4f\n", step, mean);
  }
  return 0;
}

int main() { return fsdp::launch_local(2, train); }
