// A mixture of experts whose experts often have no token on some ranks, and two ranks. attend() tells the ranks who uses an expert in this
// forward, so that one with nothing to compute skips it. Without attend() it would run a pass on zeros, because the others need its shard.

#include <fsdp/fsdp.h>
#include <torch/torch.h>

#include <cstdio>

struct ExpertImpl : torch::nn::Module {
  ExpertImpl() : up(register_module("up", torch::nn::Linear(8, 32))), down(register_module("down", torch::nn::Linear(32, 8))) {}
  torch::Tensor forward(const torch::Tensor& x) { return down(torch::relu(up(x))); }
  torch::nn::Linear up, down;
};
TORCH_MODULE(Expert);

struct MixtureImpl : torch::nn::Module {
  MixtureImpl() : router(register_module("router", torch::nn::Linear(8, 4))), experts(register_module("experts", torch::nn::ModuleList())) {
    for (int k = 0; k < 4; ++k) experts->push_back(Expert());
  }
  torch::Tensor forward(const torch::Tensor& tokens) {
    const auto [weight, expert] = torch::softmax(router(tokens), /*dim=*/1).max(/*dim=*/1);
    auto sum = torch::zeros_like(tokens);
    for (std::size_t k = 0; k < experts->size(); ++k) {
      const auto chosen = torch::nonzero(expert == static_cast<std::int64_t>(k)).squeeze(1);
      fsdp::attend(*experts->ptr(k), chosen.numel() > 0);  // on every rank, in the same order
      if (chosen.numel() == 0) {
        ++skipped;
        continue;
      }
      const auto result = experts->ptr<ExpertImpl>(k)->forward(tokens.index_select(0, chosen));
      sum = sum.index_add(0, chosen, result * weight.index_select(0, chosen).unsqueeze(1));
    }
    return sum;
  }
  torch::nn::Linear router;
  torch::nn::ModuleList experts;
  int skipped = 0;
};
TORCH_MODULE(Mixture);

int train() {
  const auto mesh = fsdp::init_device_mesh("cpu", {{"dp_shard", -1}});
  torch::manual_seed(0);
  Mixture model;
  fsdp::fully_shard(*model, {.mesh = mesh, .units = fsdp::each<ExpertImpl>()});
  fsdp::AdamW optimizer(*model, {.lr = 1e-2});
  torch::manual_seed(1 + mesh.rank());
  for (int step = 1; step <= 400; ++step) {
    const auto tokens = torch::randn({3, 8});
    const auto loss = torch::mse_loss(model(tokens), tokens.flip(1));
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    const double mean = mesh.sum(loss.item<double>()) / static_cast<double>(mesh.size());
    if (mesh.rank() == 0 && (step == 1 || step % 100 == 0)) std::printf("step %d  loss %.3f\n", step, mean);
  }
  if (mesh.rank() == 0) std::printf("rank 0 skipped an expert %d times\n", model->skipped);
  return 0;
}

int main() { return fsdp::launch_local(2, train); }
