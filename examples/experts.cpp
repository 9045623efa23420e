// Experts on a mesh of their own: four ranks, two experts. The trunk is sharded over all ranks. Each expert belongs to two ranks, is
// sharded over these, and learns from their data alone. (A router that sends tokens to experts of other ranks would stand between the two.)

#include <fsdp/fsdp.h>
#include <torch/torch.h>

#include <cstdio>

struct ModelImpl : torch::nn::Module {
  ModelImpl() : trunk(register_module("trunk", torch::nn::Linear(8, 64))), expert(register_module("expert", torch::nn::Linear(64, 1))) {}
  torch::Tensor forward(const torch::Tensor& x) { return expert(torch::tanh(trunk(x))); }
  torch::nn::Linear trunk, expert;
};
TORCH_MODULE(Model);

int train() {
  const auto all = fsdp::init_device_mesh("cpu", {{"dp_shard", -1}});
  const auto grid = fsdp::init_device_mesh("cpu", {{"expert", 2}, {"expert_data", -1}});
  const auto number = grid.coordinate("expert");  // which expert this rank has

  torch::manual_seed(0);
  Model model;
  torch::manual_seed(10 + number);  // the same for the ranks of one expert
  model->expert->reset_parameters();
  fsdp::FullyShardOptions options{.mesh = all, .units = fsdp::each<torch::nn::LinearImpl>()};
  options.unit_settings = [&](const std::string& name, const torch::nn::Module&) {
    if (name != "expert") return fsdp::UnitSettings{};
    // Divided by the number of all ranks, the sum over its two is the gradient of the mean of all losses, as the trunk's.
    return fsdp::UnitSettings{.mesh = grid["expert_data"], .gradient_divide_factor = static_cast<double>(all.size())};
  };
  auto sharded = fsdp::fully_shard(*model, options);
  fsdp::AdamW optimizer(*model, {.lr = 1e-2});

  torch::manual_seed(100 + all.rank());
  for (int step = 1; step <= 50; ++step) {
    const auto x = torch::randn({16, 8});
    const auto sums = x.sum(/*dim=*/1, /*keepdim=*/true);
    const auto loss = torch::mse_loss(model->forward(x), number == 0 ? sums : -sums);  // what experts differ in
    loss.backward();
    fsdp::clip_grad_norm(*model, 1.0);  // of the trunk and all experts
    optimizer.step();
    optimizer.zero_grad();

    const double mean = all.sum(loss.item<double>()) / static_cast<double>(all.size());
    if (all.rank() == 0 && step % 10 == 0) std::printf("step %d  loss %.4f\n", step, mean);
  }
  if (all.rank() == 0)
    std::printf("trunk on %lld ranks, each expert on %lld\n", static_cast<long long>(all.size()),
                static_cast<long long>(grid.size("expert_data")));
  return 0;
}

int main() { return fsdp::launch_local(4, train); }
