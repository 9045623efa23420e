// What checked microbatches cost: turns of a hundred steps of one training, with fsdp::ReplayCheck on every microbatch, every tenth and
// every hundredth, and without, in the same ranks. Prints the table of docs/run/corruption.md.

#include <fsdp/fsdp.h>
#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <vector>

#include "gpt.h"
#include "turns.h"

namespace {

constexpr std::int64_t kBatch = 4, kContext = 128;
constexpr int kWarmUp = 3;
constexpr std::array<int, 4> kEvery = {0, 1, 10, 100};

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
  const fsdp::ReplayCheck::Microbatch microbatch = [&](const std::vector<at::Tensor>& batch) {
    model->loss(batch[0], batch[1]).backward();
  };
  std::int64_t number = 0;
  const auto step = [&](fsdp::ReplayCheck* check) {
    const auto tokens = ((at::arange(kBatch * (kContext + 1)) + number++ * 7919 + mesh.rank() * 104'729) * 48'271).remainder(4096);
    const auto rows = tokens.view({kBatch, kContext + 1});
    const std::vector<at::Tensor> batch = {rows.narrow(1, 0, kContext).contiguous(), rows.narrow(1, 1, kContext).contiguous()};
    check != nullptr ? check->run(microbatch, batch) : microbatch(batch);
    optimizer.step();
    optimizer.zero_grad();
    if (check != nullptr) check->remember_parameters();
  };
  // A turn has so many steps that the rarest check comes in it once. `every` of 0: none.
  const auto turn = [&](int every) {
    std::optional<fsdp::ReplayCheck> check;
    if (every > 0) check.emplace(*model, every);
    mesh.barrier();
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < kEvery.back(); ++i) step(check ? &*check : nullptr);
    return slowest(mesh, std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count());
  };
  for (int i = 0; i < kWarmUp; ++i) step(nullptr);
  std::array<std::vector<double>, kEvery.size()> ratios;
  for (int round = 0; round < rounds; ++round) {
    std::array<double, kEvery.size()> ms{};
    for (std::size_t i = 0; i < kEvery.size(); ++i) {
      const auto which = (i + static_cast<std::size_t>(round)) % kEvery.size();
      ms[which] = turn(kEvery[which]);
    }
    for (std::size_t i = 1; i < kEvery.size(); ++i) ratios[i].push_back(ms[i] / ms.front());
  }
  for (std::size_t i = 1; i < kEvery.size() && mesh.rank() == 0; ++i) {
    const auto [low, high] = std::minmax_element(ratios[i].begin(), ratios[i].end());
    std::printf("every = %3d: a step takes %.3f (%.3f to %.3f) of one without checks\n", kEvery[i], median(ratios[i]), *low, *high);
  }
  mesh.barrier();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const auto turns = fsdp::bench::read_turns("bench_replay_check", argc, argv, {.ranks = 2, .rounds = 3});
  if (!turns) return 2;
  return fsdp::launch_local(turns->ranks, [&] { return run(turns->rounds); });
}
