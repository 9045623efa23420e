// One step of a sharded model on two ranks, with the installed package only. The result must be that of the same step unsharded: it
// would not be if the installed library had lost its dispatcher fallback.

#include <fsdp/fsdp.h>
#include <torch/torch.h>

#include <cstdlib>
#include <iostream>

namespace {

torch::nn::Sequential make_model() {
  torch::manual_seed(7);
  return torch::nn::Sequential(torch::nn::Linear(8, 16), torch::nn::Tanh(), torch::nn::Linear(16, 3));
}

torch::Tensor loss_of(torch::nn::Sequential& model) { return model->forward(torch::ones({4, 8})).square().mean(); }

int rank_main() {
  auto reference = make_model();
  torch::optim::SGD reference_optimizer(reference->parameters(), torch::optim::SGDOptions(0.1));
  loss_of(reference).backward();
  reference_optimizer.step();

  auto model = make_model();
  auto sharded =
      fsdp::fully_shard(*model, {.mesh = fsdp::init_device_mesh("cpu", {{"dp_shard", -1}}), .units = fsdp::each<torch::nn::LinearImpl>()});
  fsdp::SGD optimizer(*model, {.lr = 0.1});
  loss_of(model).backward();
  optimizer.step();

  const auto expected = reference->named_parameters();
  for (const auto& [name, value] : sharded.full_parameters()) {
    if (!torch::allclose(value, expected[name])) {
      std::cerr << name << " differs from the unsharded step\n";
      return EXIT_FAILURE;
    }
  }
  return EXIT_SUCCESS;
}

}  // namespace

int main() { return fsdp::launch_local(2, rank_main); }
