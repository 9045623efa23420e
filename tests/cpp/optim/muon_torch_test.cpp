// Muon against torch.optim.Muon itself, which tests/cpp/peers/muon_peer.py runs.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "fsdp/fsdp.h"
#include "support/python_peer.h"
#include "support/reference.h"
#include "support/temporary_folder.h"
#include "support/twins.h"
#include "test_paths.h"

namespace fsdp {
namespace muon_torch_test {

using testing::line;
using testing::over_ranks;
using testing::TemporaryFolder;

const std::vector<std::string> kNames = {"wide", "tall", "square"};
constexpr int kSteps = 4;

/// As muon_peer.py's.
const std::vector<MuonOptions>& cases() {
  static const std::vector<MuonOptions> all = {
      {.lr = 0.02, .ns_dtype = at::kBFloat16},
      {.lr = 0.05, .weight_decay = 0.2, .momentum = 0.5, .nesterov = false, .ns_steps = 3, .ns_dtype = at::kBFloat16},
      {.lr = 0.01, .weight_decay = 0.1, .momentum = 0.9, .adjust_lr = AdjustLR::kMatchRMSAdamW, .ns_dtype = at::kBFloat16}};
  return all;
}

std::map<std::string, at::Tensor> read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  std::map<std::string, at::Tensor> tensors;
  for (const auto& item : torch::pickle_load(bytes).toGenericDict()) tensors[item.key().toStringRef()] = item.value().toTensor();
  return tensors;
}

TEST(MuonOfTorch, GivesTheSameMatrices) {
  const TemporaryFolder folder;
  const std::string path = (folder.path() / "muon.pt").string();
  testing::run_peer(testing::kMuonPeer, {path});
  over_ranks([&] {
    const auto tensors = read(path);
    for (std::size_t k = 0; k < cases().size(); ++k) {
      const auto of = [&](const std::string& name) { return tensors.at(std::to_string(k) + "." + name); };
      for (const auto& strategy : testing::all_strategies()) {
        torch::nn::Module model;
        for (const auto& name : kNames) model.register_parameter(name, of(name + ".0").clone());
        auto sharded = fully_shard(model, {.mesh = line(), .placements = Placements::from_name(strategy), .granularity = whole_matrices()});
        Muon optimizer(model, cases()[k]);
        for (int step = 1; step <= kSteps; ++step) {
          const auto number = std::to_string(step);
          at::Tensor loss = at::zeros({});
          for (const auto& item : model.named_parameters()) loss = loss + (item.value() * of(item.key() + ".gradient." + number)).sum();
          loss.backward();
          optimizer.step();
          optimizer.zero_grad();
          for (const auto& [name, value] : sharded.full_parameters()) {
            const auto expected = of(name + "." + number);
            EXPECT_TRUE(torch::allclose(value, expected, 1e-6, 1e-6))
                << "case " << k << ", " << strategy << ", " << name << ", step " << step << ": differs by up to "
                << (value - expected).abs().max().item<double>();
            EXPECT_GT((value - of(name + "." + std::to_string(step - 1))).abs().max().item<double>(), 1e-3);
          }
        }
      }
    }
  });
}

}  // namespace muon_torch_test
}  // namespace fsdp
