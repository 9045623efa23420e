// What a checked microbatch costs: steps of one training with fsdp::ReplayCheck and without, in the same ranks and in turn. Prints the
// table of docs/run/corruption.md.

#include <fsdp/fsdp.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <vector>

#include "gpt.h"

namespace {

constexpr std::int64_t kBatch = 4, kContext = 128;
constexpr int kWarmUp = 3;

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// The slowest rank's.
double slowest(const fsdp::DeviceMesh& mesh, double value) {
  double largest = 0;
  for (std::int64_t rank = 0; rank < mesh.size(); ++rank) largest = std::max(largest, mesh.sum(mesh.rank() == rank ? value : 0.0));
  return largest;
}

int run(int rounds) {
  at::set_num_threads(1);
  const auto mesh = fsdp::init_device_mesh("cpu", {{"dp_shard", -1}});
  torch::manual_seed(1);
  GPT model(GPTConfig{.vocab = 4096, .dim = 256, .layers = 8, .heads = 8, .context = kContext});
  fsdp::fully_shard(*model, {.mesh = mesh, .units = fsdp::each<GPTBlockImpl>()});
  fsdp::AdamW optimizer(*model, {.lr = 3e-4});
  fsdp::ReplayCheck check(*model, 1);
  const fsdp::ReplayCheck::Microbatch microbatch = [&](const std::vector<at::Tensor>& batch) {
    model->loss(batch[0], batch[1]).backward();
  };
  std::int64_t number = 0;
  const auto step = [&](bool checks) {
    const auto tokens = ((at::arange(kBatch * (kContext + 1)) + number++ * 7919 + mesh.rank() * 104'729) * 48'271).remainder(4096);
    const auto rows = tokens.view({kBatch, kContext + 1});
    const std::vector<at::Tensor> batch = {rows.narrow(1, 0, kContext).contiguous(), rows.narrow(1, 1, kContext).contiguous()};
    mesh.barrier();
    const auto begin = std::chrono::steady_clock::now();
    checks ? check.run(microbatch, batch) : microbatch(batch);
    optimizer.step();
    optimizer.zero_grad();
    if (checks) check.remember_parameters();
    return slowest(mesh, std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count());
  };
  for (int i = 0; i < kWarmUp; ++i) {
    step(false);
    step(true);
  }
  std::vector<double> ratios;
  for (int round = 0; round < rounds; ++round) {
    const bool checked_first = round % 2 == 1;
    const auto first = step(checked_first);
    const auto second = step(!checked_first);
    ratios.push_back(checked_first ? first / second : second / first);
  }
  if (mesh.rank() == 0) {
    const auto [low, high] = std::minmax_element(ratios.begin(), ratios.end());
    const auto cost = median(ratios) - 1;
    std::printf("a checked step: %.2f (%.2f to %.2f) of one that is not\n", cost + 1, *low, *high);
    for (const int every : {1, 10, 100}) std::printf("every = %d: %.3f\n", every, 1 + cost / every);
  }
  mesh.barrier();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 3) {
    std::cerr << "usage: bench_replay_check [RANKS] [ROUNDS]\n";
    return 2;
  }
  const int ranks = argc > 1 ? std::atoi(argv[1]) : 2;
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 10;
  if (ranks < 1 || rounds < 1) {
    std::cerr << "bench_replay_check: ranks and rounds must be positive\n";
    return 2;
  }
  return fsdp::launch_local(ranks, [&] { return run(rounds); });
}
