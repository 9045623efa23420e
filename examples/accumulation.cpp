// Gradient accumulation, clipping and a schedule of the learning rate: a large batch in small parts, whose gradients are reduced once.

#include <fsdp/fsdp.h>
#include <torch/torch.h>

#include <cstdio>

int train() {
  const auto mesh = fsdp::init_device_mesh("cpu", {{"dp_shard", -1}});
  torch::manual_seed(0);
  torch::nn::Sequential model(torch::nn::Linear(8, 64), torch::nn::Tanh(), torch::nn::Linear(64, 1));
  auto sharded = fsdp::fully_shard(*model, {.mesh = mesh, .units = fsdp::each<torch::nn::LinearImpl>()});
  const auto is_bias = [](const std::string& name) { return name.ends_with("bias"); };
  fsdp::AdamW optimizer(*model, {.lr = 1e-2, .weight_decay = 0.1}, {{.matches = is_bias, .weight_decay = 0.0}});

  constexpr int kSteps = 50;
  constexpr int kParts = 4;
  const auto schedule = fsdp::cosine_schedule(/*warmup_steps=*/5, kSteps, /*final_factor=*/0.1);

  torch::manual_seed(1 + mesh.rank());
  for (int step = 0; step < kSteps; ++step) {
    optimizer.set_lr_factor(schedule(step));
    sharded.reset_wire_stats();
    double loss = 0;
    for (int part = 0; part < kParts; ++part) {
      sharded.set_requires_gradient_sync(part == kParts - 1);  // earlier parts' gradients stay on their rank
      const auto x = torch::randn({8, 8});
      const auto loss_of_part = torch::mse_loss(model->forward(x), x.sum(/*dim=*/1, /*keepdim=*/true)) / kParts;
      loss_of_part.backward();
      loss += loss_of_part.item<double>();
    }
    const auto reductions = sharded.wire_stats().reduce_scatters;
    const double norm = fsdp::clip_grad_norm(*model, 1.0);  // of the whole gradient, before clipping; the same on every rank
    optimizer.step();
    optimizer.zero_grad();

    const double mean = mesh.sum(loss) / static_cast<double>(mesh.size());
    if (mesh.rank() == 0 && (step + 1) % 10 == 0) {
      std::printf("step %d  loss %.4f  gradient norm %.3f  lr %.5f  reductions %lld\n", step + 1, mean, norm, optimizer.lr(),
                  static_cast<long long>(reductions));
    }
  }
  return 0;
}

int main() { return fsdp::launch_local(2, train); }
