// Hybrid sharding (HSDP): two machines of two ranks each. Parameters are sharded within a machine, where ranks are close to each other, and
// replicated over machines, which exchange the shards' gradients only. Here all ranks are processes of one machine.

#include <fsdp/fsdp.h>
#include <torch/torch.h>

#include <cstdio>

int train() {
  // The last dimension is the one to shard over: ranks 0 and 1, and ranks 2 and 3.
  const auto mesh = fsdp::init_device_mesh("cpu", {{"machine", 2}, {"within_machine", -1}});

  torch::manual_seed(0);
  torch::nn::Sequential model(torch::nn::Linear(8, 64), torch::nn::Tanh(), torch::nn::Linear(64, 1));
  const auto sharded = fsdp::fully_shard(*model, {.mesh = mesh, .units = fsdp::each<torch::nn::LinearImpl>()});
  fsdp::AdamW optimizer(*model, {.lr = 1e-2});

  std::int64_t held = 0;
  for (const auto& shard : sharded.parameter_shards()) held += shard.value.numel();
  std::int64_t whole = 0;
  for (const auto& parameter : model->parameters()) whole += parameter.numel();
  if (mesh.rank() == 0) {
    std::printf("rank 0 of %lld holds %lld of %lld parameters\n", static_cast<long long>(mesh.size()), static_cast<long long>(held),
                static_cast<long long>(whole));
  }

  torch::manual_seed(1 + mesh.rank());  // the batch is divided over all ranks, of all machines
  for (int step = 1; step <= 50; ++step) {
    const auto x = torch::randn({8, 8});
    const auto loss = torch::mse_loss(model->forward(x), x.sum(/*dim=*/1, /*keepdim=*/true));
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();

    const double mean = mesh.sum(loss.item<double>()) / static_cast<double>(mesh.size());
    if (mesh.rank() == 0 && step % 10 == 0) std::printf("step %d  loss %.4f\n", step, mean);
  }
  return 0;
}

int main() { return fsdp::launch_local(4, train); }
