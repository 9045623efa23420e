// hosts_step: what hosts_test.py starts on several hosts. Trains a model for some steps, compares it with the same steps unsharded in this
// process, and says how many bytes were sent.

#include <fsdp/fsdp.h>
#include <torch/torch.h>

#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

namespace {

constexpr int kSteps = 3;
constexpr double kLearningRate = 0.1;

torch::nn::Sequential make_model() {
  torch::manual_seed(7);
  return torch::nn::Sequential(torch::nn::Linear(256, 1024), torch::nn::Tanh(), torch::nn::Linear(1024, 1024), torch::nn::Tanh(),
                               torch::nn::Linear(1024, 256));
}

/// On one rank's own data.
torch::Tensor loss_of(torch::nn::Sequential& model, int step, std::int64_t rank) {
  torch::manual_seed(100 * step + rank);
  return model->forward(torch::randn({8, 256})).square().mean();
}

/// Neighbours in pairs, again and again: the order in which the library adds the ranks' gradients.
torch::Tensor sum_of(std::vector<torch::Tensor> terms) {
  while (terms.size() > 1) {
    std::vector<torch::Tensor> pairs;
    for (std::size_t i = 0; i < terms.size(); i += 2) pairs.push_back(i + 1 < terms.size() ? terms[i] + terms[i + 1] : terms[i]);
    terms = pairs;
  }
  return terms.front();
}

torch::OrderedDict<std::string, torch::Tensor> train_whole(std::int64_t ranks) {
  auto model = make_model();
  for (int step = 0; step < kSteps; ++step) {
    std::vector<std::vector<torch::Tensor>> gradients;  // by rank and parameter
    for (std::int64_t rank = 0; rank < ranks; ++rank) {
      gradients.push_back(torch::autograd::grad({loss_of(model, step, rank)}, model->parameters()));
    }
    const torch::NoGradGuard no_grad;
    const auto parameters = model->parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      std::vector<torch::Tensor> terms;
      for (const auto& of_rank : gradients) terms.push_back(of_rank[i]);
      torch::Tensor(parameters[i]).add_(sum_of(terms) * (1.0 / static_cast<double>(ranks)), -kLearningRate);
    }
  }
  return model->named_parameters();
}

void train() {
  const auto mesh = fsdp::init_device_mesh("cpu", {{"dp_shard", -1}});
  auto model = make_model();
  auto sharded = fsdp::fully_shard(*model, {.mesh = mesh, .units = fsdp::each<torch::nn::LinearImpl>()});
  fsdp::SGD optimizer(*model, {.lr = kLearningRate});
  for (int step = 0; step < kSteps; ++step) {
    loss_of(model, step, mesh.rank()).backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  const auto expected = train_whole(mesh.size());
  for (const auto& [name, value] : sharded.full_parameters()) {
    if (!torch::equal(value, expected[name])) throw fsdp::Error(name + " differs from the unsharded steps");
  }
  const auto stats = sharded.wire_stats();
  // In one piece: ranks share a terminal.
  std::cout << "rank " + std::to_string(mesh.rank()) + ": the bits of one process; data " +
                   std::to_string(stats.all_gather_bytes + stats.reduce_scatter_bytes) + " shared " +
                   std::to_string(stats.shared_memory_bytes) + "\n"
            << std::flush;
  mesh.barrier();  // The first rank serves the store.
}

}  // namespace

int main() {
  try {
    train();
    return EXIT_SUCCESS;
  } catch (const std::exception& error) {
    std::cout << std::string(error.what()) + "\n" << std::flush;
    return EXIT_FAILURE;
  }
}
