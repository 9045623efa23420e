// Initialises a GPT of 1.3 billion parameters on four ranks, and asserts what each of them takes: its shards, and less than one unit more.
// Whole, the model would take 5.3 GB on each; the four together 21 GB.

#include <fsdp/fsdp.h>
#include <sys/mman.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <optional>
#include <string>

#include "gpt.h"

namespace {

constexpr int kRanks = 4;
constexpr std::int64_t kLayers = 24;
constexpr double kMB = 1e6;

/// Beyond shards and one unit: pages of malloc's heap that are free but not given back, huge pages filled in part, the
/// recorded operators with their generators' states (5 kB each).
constexpr std::int64_t kConstant = 48'000'000;

/// A line of /proc/self/status in bytes: VmRSS is what the process holds, VmHWM the most that it held.
std::int64_t status_bytes(const std::string& key) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(key + ":")) return std::stoll(line.substr(key.size() + 1)) * 1024;
  }
  return 0;
}

/// Maps all pages of the program's files: torch's libraries alone are hundreds of megabytes, and would count as they are used.
void map_files() {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find(".so") == std::string::npos || line.find(" r") == std::string::npos) continue;
    std::size_t dash = 0;
    const auto begin = std::stoull(line, &dash, 16);
    const auto end = std::stoull(line.substr(dash + 1), nullptr, 16);
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_POPULATE_READ);
  }
}

/// VmHWM starts again from VmRSS.
void reset_peak() { std::ofstream("/proc/self/clear_refs") << "5"; }

std::int64_t parameter_bytes(const torch::nn::Module& module, bool recurse = true) {
  std::int64_t bytes = 0;
  for (const auto& parameter : module.parameters(recurse)) bytes += static_cast<std::int64_t>(parameter.nbytes());
  return bytes;
}

/// The deviation with which GPT-2 draws a weight; nothing for the gains of norms, which are 1.
std::optional<double> drawn_deviation(const std::string& name, std::int64_t layers) {
  if (name.find("norm") != std::string::npos) return std::nullopt;
  const bool residual = name.find("_out.weight") != std::string::npos;
  return residual ? 0.02 / std::sqrt(2.0 * static_cast<double>(layers)) : 0.02;
}

/// The first parameter whose mean and deviation, over all ranks' shards, are not those of what was drawn; "" if there is none. Collective.
std::string wrong_parameter(const fsdp::FSDPModule& sharded, const fsdp::DeviceMesh& mesh) {
  std::string wrong;
  for (const auto& shard : sharded.parameter_shards()) {
    const auto values = shard.value.to(at::kDouble);
    const double numel = mesh.sum(static_cast<double>(values.numel()));
    const double mean = mesh.sum(values.sum().item<double>()) / numel;
    const double deviation = std::sqrt(std::max(mesh.sum(values.square().sum().item<double>()) / numel - mean * mean, 0.0));
    const auto drawn = drawn_deviation(shard.name, kLayers);
    // Six times what chance makes of so many numbers.
    const bool right = drawn ? std::abs(mean) < 6 * *drawn / std::sqrt(numel) && std::abs(deviation / *drawn - 1) < 6 / std::sqrt(2 * numel)
                             : mean == 1 && deviation == 0;
    if (!right && wrong.empty()) wrong = shard.name;
  }
  return wrong;
}

int initialise() {
  const auto mesh = fsdp::init_device_mesh("cpu", {{"dp_shard", -1}});
  at::randn({1024}).square().sum().item<float>();  // what torch allocates once
  map_files();
  mesh.barrier();
  const std::int64_t before = status_bytes("VmRSS");
  reset_peak();

  const auto begin = std::chrono::steady_clock::now();
  const auto seconds = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(); };
  torch::manual_seed(1);
  auto model = fsdp::deferred_init([] {
    return GPT(GPTConfig{.vocab = 50'304, .dim = 2048, .layers = kLayers, .heads = 16, .hidden = 5504, .context = 2048, .tied = true});
  });
  const double built = seconds();
  const std::int64_t building = status_bytes("VmHWM") - before;
  const std::int64_t whole = parameter_bytes(*model);
  std::int64_t largest_parameter = 0;
  for (const auto& parameter : model->parameters()) {
    largest_parameter = std::max(largest_parameter, static_cast<std::int64_t>(parameter.nbytes()));
  }
  std::int64_t largest_block = 0;
  for (const auto& child : model->modules()) {
    if (child->as<GPTBlockImpl>() != nullptr) largest_block = std::max(largest_block, parameter_bytes(*child));
  }
  const std::int64_t largest_unit = std::max(largest_block, largest_parameter);  // the root's is the embedding

  const auto sharded = fsdp::fully_shard(*model, {.mesh = mesh, .units = fsdp::each<GPTBlockImpl>()});
  const double done = seconds();
  const std::int64_t peak = status_bytes("VmHWM") - before;
  const std::int64_t shards = sharded.memory_stats().main_parameters.live;

  const std::string wrong = wrong_parameter(sharded, mesh);

  for (int rank = 0; rank < mesh.size(); ++rank) {
    mesh.barrier();
    if (rank != mesh.rank()) continue;
    std::printf(
        "rank %d: %.2f billion parameters, %.0f MB whole; building peaked at %.0f MB (largest parameter %.0f), initialising at %.0f MB: "
        "shards %.0f, largest unit %.0f; %.0f s + %.0f s; values %s\n",
        rank, static_cast<double>(whole) / 4e9, static_cast<double>(whole) / kMB, static_cast<double>(building) / kMB,
        static_cast<double>(largest_parameter) / kMB, static_cast<double>(peak) / kMB, static_cast<double>(shards) / kMB,
        static_cast<double>(largest_unit) / kMB, built, done - built,
        wrong.empty() ? "as drawn" : ("of " + wrong + " are not as drawn").c_str());
    std::fflush(stdout);
  }
  if (building > largest_parameter + kConstant) return 2;
  if (peak > shards + largest_unit + kConstant) return 3;
  if (shards > whole / mesh.size() + kConstant) return 4;
  return wrong.empty() ? 0 : 5;
}

}  // namespace

int main() { return fsdp::launch_local(kRanks, initialise); }
