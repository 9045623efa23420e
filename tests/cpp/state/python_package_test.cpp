// A run that begins in C++ goes on in Python, by the package, and back in C++: the same bits as one that never left C++.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/fsdp.h"
#include "support/make_optimizer.h"
#include "support/multi_rank.h"
#include "support/python_peer.h"
#include "support/same_bits.h"
#include "support/stack.h"
#include "support/stored.h"
#include "support/temporary_folder.h"
#include "test_paths.h"

namespace python_package_test {

using fsdp::testing::expect_same_bits;
using fsdp::testing::run_ranks;
using fsdp::testing::stored_tensors;

using Tensors = std::map<std::string, at::Tensor>;

// On two ranks, each rank's rows of each parameter fill whole registers (or, of the last bias, none): there updates do not depend on where
// a parameter is cut.
constexpr int kRanks = 2;
fsdp::testing::Stack make_stack() { return fsdp::testing::make_stack({.width = 32, .hidden = {64, 32}}); }

/// An optimizer of both languages, and how its state lies on the ranks in C++. Python cuts rows.
struct Kind {
  std::string name;
  fsdp::testing::MakeOptimizer make;
  std::function<fsdp::Granularity(const std::string& name, const at::Tensor& parameter)> granularity = {};
  bool has_8bit_state = false;
};

bool is_hidden(const std::string& name) { return name.starts_with("blocks."); }

Kind adamw() { return {.name = "AdamW", .make = fsdp::testing::adamw()}; }

/// Python's iterations run in bfloat16, on every device.
Kind muon() {
  const fsdp::MuonOptions options = {.weight_decay = 0.1, .ns_dtype = torch::kBFloat16, .matrices = is_hidden, .adamw = {.lr = 1e-2}};
  return {.name = "Muon", .make = fsdp::testing::make<fsdp::Muon>(options), .granularity = fsdp::whole_matrices(is_hidden)};
}

Kind adamw_8bit() {
  return {.name = "AdamW8bit",
          .make = fsdp::testing::make<fsdp::AdamW8bit>(fsdp::AdamW8bitOptions{.lr = 1e-2, .min_8bit_size = 256}),
          .granularity = [](const std::string&, const at::Tensor&) { return fsdp::Granularity::blocks(fsdp::AdamW8bit::kBlock); },
          .has_8bit_state = true};
}

/// Of both languages: parameters, state of the optimizer, and each rank's losses.
Tensors of_both(Tensors tensors) {
  std::erase_if(tensors, [&](const auto& entry) {
    // torch's Muon does not count its updates.
    if (entry.first.ends_with(".step") && tensors.contains(entry.first.substr(0, entry.first.size() - 4) + "momentum_buffer")) return true;
    return !entry.first.starts_with("model.") && !entry.first.starts_with("optim.state.") && !entry.first.starts_with("losses_");
  });
  return tensors;
}

/// Loads `source` (if not empty), trains steps first, first + 1, ..., and saves `target`. Losses go beside it: C++ saves rank 0's alone.
void train_in_cpp(const Kind& kind, const std::string& source, const std::string& target, int first, int steps) {
  run_ranks(kRanks, [&](int rank) {
    auto model = make_stack();
    fsdp::fully_shard(*model, {.mesh = fsdp::init_device_mesh("cpu", {{"dp_shard", -1}}),
                               .units = fsdp::testing::stack_units(),
                               .granularity = kind.granularity});
    const auto optimizer = kind.make(*model);
    if (!source.empty()) fsdp::load(source, *model, *optimizer);
    std::vector<at::Tensor> losses;
    for (int step = first; step < first + steps; ++step) {
      const auto loss = fsdp::testing::stack_loss(model, step, rank);
      loss.backward();
      optimizer->step();
      optimizer->zero_grad();
      losses.push_back(loss.detach());
    }
    fsdp::save(target, *model, *optimizer);
    torch::save(at::stack(losses), target + ".losses_" + std::to_string(rank));
  });
}

void train_in_python(const Kind& kind, const std::string& source, const std::string& target, int first, int steps) {
  fsdp::testing::run_peer(fsdp::testing::kPackagePeer, {kind.name, source, target, std::to_string(first), std::to_string(steps)}, 2);
}

Tensors of_cpp(const std::string& target) {
  auto tensors = of_both(stored_tensors(target));
  for (int rank = 0; rank < kRanks; ++rank) {
    const auto name = "losses_" + std::to_string(rank);
    torch::load(tensors[name], target + "." + name);
  }
  return tensors;
}

class PythonPackage : public ::testing::TestWithParam<Kind> {};

TEST_P(PythonPackage, GoesOnWhereCppStoppedAndBack) {
  if (!std::filesystem::exists(fsdp::testing::kPythonPackage + "/libfsdp")) GTEST_SKIP() << "this build has no Python package";
  const fsdp::testing::TemporaryFolder folder;
  const auto path = [&](const std::string& name) { return (folder.path() / name).string(); };
  const auto& kind = GetParam();
  train_in_cpp(kind, "", path("cpp2"), 0, 2);
  train_in_cpp(kind, path("cpp2"), path("cpp4"), 2, 2);
  train_in_python(kind, path("cpp2"), path("python4"), 2, 2);
  expect_same_bits(of_both(stored_tensors(path("python4"))), of_cpp(path("cpp4")));

  train_in_cpp(kind, path("cpp4"), path("cpp6"), 4, 2);
  train_in_cpp(kind, path("python4"), path("back6"), 4, 2);
  train_in_cpp(kind, path("python4.own"), path("own6"), 4, 2);  // which libfsdp.save wrote
  train_in_python(kind, path("python4.own"), path("python6"), 4, 2);
  const auto expected = of_cpp(path("cpp6"));
  expect_same_bits(of_cpp(path("back6")), expected);
  expect_same_bits(of_cpp(path("own6")), expected);
  expect_same_bits(of_both(stored_tensors(path("python6"))), expected);
  EXPECT_EQ(expected.at("optim.state.entry.weight.step").item<float>(), 6);
  EXPECT_EQ(expected.at("losses_1").numel(), 2);
  const std::string hidden = "optim.state.blocks.0.up.weight.";
  EXPECT_EQ(expected.contains(hidden + "momentum_buffer"), kind.name == "Muon");
  EXPECT_EQ(expected.contains(hidden + "state1") && expected.at(hidden + "state1").scalar_type() == torch::kUInt8, kind.has_8bit_state);
}

INSTANTIATE_TEST_SUITE_P(Optimizers, PythonPackage, ::testing::Values(adamw(), muon(), adamw_8bit()),
                         [](const auto& info) { return info.param.name; });

}  // namespace python_package_test
