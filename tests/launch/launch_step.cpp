// launch_step RANKS: what launch.sh starts under a launcher. Every rank meets the others, sums, shards a model, trains it for a step, and
// compares it with the same step unsharded. Fails unless there are RANKS ranks.
// launch_step RANKS uneven: rank 0 has a batch less than the others.

#include <fsdp/fsdp.h>
#include <torch/torch.h>

#include <cstdlib>
#include <iostream>
#include <string>

namespace {

torch::nn::Sequential make_model() {
  torch::manual_seed(7);
  return torch::nn::Sequential(torch::nn::Linear(8, 16), torch::nn::Tanh(), torch::nn::Linear(16, 3));
}

/// On one rank's own data.
torch::Tensor loss_of(torch::nn::Sequential& model, std::int64_t rank) {
  return model->forward(torch::ones({4, 8}) * static_cast<double>(rank + 1)).square().mean();
}

int train(std::int64_t ranks) {
  const auto mesh = fsdp::init_device_mesh("cpu", {{"dp_shard", -1}});
  if (mesh.size() != ranks) throw fsdp::Error("expected " + std::to_string(ranks) + " ranks, found " + std::to_string(mesh.size()));
  const double sum = mesh.sum(static_cast<double>(mesh.rank() + 1));
  if (sum != static_cast<double>(ranks * (ranks + 1) / 2)) throw fsdp::Error("the ranks' numbers add up to " + std::to_string(sum));

  auto whole = make_model();
  torch::optim::SGD whole_optimizer(whole->parameters(), torch::optim::SGDOptions(0.1));
  for (std::int64_t rank = 0; rank < ranks; ++rank) (loss_of(whole, rank) / ranks).backward();
  whole_optimizer.step();

  auto model = make_model();
  const auto sharded = fsdp::fully_shard(*model, {.mesh = mesh, .units = fsdp::each<torch::nn::LinearImpl>()});
  fsdp::SGD optimizer(*model, {.lr = 0.1});
  loss_of(model, mesh.rank()).backward();
  optimizer.step();
  const auto expected = whole->named_parameters();
  const auto initial = make_model()->named_parameters();
  for (const auto& [name, value] : sharded.full_parameters()) {
    if (!torch::allclose(value, expected[name], 1e-5, 1e-6)) throw fsdp::Error(name + " differs from the unsharded step");
    if (torch::allclose(value, initial[name], 1e-5, 1e-6)) throw fsdp::Error(name + " has not been trained");
  }
  // In one piece: ranks share a terminal.
  std::cout << "rank " + std::to_string(mesh.rank()) + " of " + std::to_string(ranks) + ": one step as the whole model\n" << std::flush;
  return EXIT_SUCCESS;
}

int train_unevenly() {
  const auto mesh = fsdp::init_device_mesh("cpu", {{"dp_shard", -1}});
  auto model = make_model();
  fsdp::fully_shard(*model, {.mesh = mesh, .units = fsdp::each<torch::nn::LinearImpl>()});
  for (int batch = mesh.rank() == 0 ? 1 : 0; batch < 3; ++batch) loss_of(model, mesh.rank()).backward();
  return EXIT_SUCCESS;
}

}  // namespace

// Under a launcher the function runs right here, in as many ranks as that has started; the number is for those that it would start itself.
int main(int argc, char** argv) {
  if (argc != 2 && argc != 3) return EXIT_FAILURE;
  if (!fsdp::is_launched()) {
    std::cerr << "this process is no launched rank\n";
    return EXIT_FAILURE;
  }
  return fsdp::launch_local(7, [&] { return argc == 3 ? train_unevenly() : train(std::atoi(argv[1])); });
}
