// A run that NVIDIA's Megatron-FSDP begins goes on in C++, from the checkpoint that it wrote itself, and back there.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "fsdp/fsdp.h"
#include "fsdp/megatron_names.h"
#include "support/multi_rank.h"
#include "support/python_peer.h"
#include "support/stack.h"
#include "support/stored.h"
#include "support/temporary_folder.h"
#include "test_paths.h"

namespace megatron_test {

using fsdp::testing::run_ranks;
using fsdp::testing::stored_tensors;

using Tensors = std::map<std::string, at::Tensor>;

constexpr int kPeerRanks = 2;
/// The peer sometimes dies of a signal or hangs on CPUs, in processes that do not load libfsdp; then it is started again.
constexpr int kPeerAttempts = 3;

/// What a folder's checkpoint is of.
enum class Writer { kMegatron, kCpp };

bool megatron_is_installed() {
  const std::string looks = " -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec(\"megatron_fsdp\") is None)'";
  return std::system((fsdp::testing::kPython + looks).c_str()) == 0;
}

/// Megatron-FSDP itself loads `source` (if not empty), trains steps first, first + 1, ..., and saves `target`.
void train_in_megatron(Writer writer, const std::string& source, const std::string& target, int first, int steps) {
  const std::vector<std::string> arguments = {writer == Writer::kMegatron ? "megatron" : "cpp", source.empty() ? "-" : source, target,
                                              std::to_string(first), std::to_string(steps)};
  auto& python = fsdp::testing::PythonServer::of_this_process();
  int result = 1;
  for (int attempt = 0; attempt < kPeerAttempts && result != 0; ++attempt) {
    result = python.run(fsdp::testing::kMegatronPeer, arguments, kPeerRanks);
  }
  ASSERT_EQ(result, 0) << ::testing::PrintToString(arguments);
}

/// The same in C++, on any number of ranks that take the batches of the peer's in turn.
void train_in_cpp(int ranks, Writer writer, const std::string& source, const std::string& target, int first, int steps) {
  run_ranks(ranks, [&](int rank) {
    auto model = fsdp::testing::make_stack();
    fsdp::fully_shard(*model, {.mesh = fsdp::init_device_mesh("cpu", {{"dp_shard", -1}}), .units = fsdp::testing::stack_units()});
    fsdp::AdamW optimizer(*model, {.lr = 1e-2});
    fsdp::load(source, *model, optimizer, writer == Writer::kMegatron ? fsdp::megatron_names(*model) : fsdp::LoadOptions{});
    for (int step = first; step < first + steps; ++step) {
      fsdp::testing::stack_loss(model, step, rank % kPeerRanks).backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    fsdp::save(target, *model, optimizer);
  });
}

/// Parameters and state of the optimizer, by the names that C++ gives them.
Tensors of_cpp(const std::string& folder) {
  auto tensors = stored_tensors(folder);
  std::erase_if(tensors, [](const auto& entry) { return entry.first.starts_with("fsdp."); });
  return tensors;
}

Tensors of_megatron(const std::string& folder) {
  std::vector<std::string> parameters;
  for (const auto& entry : fsdp::testing::make_stack()->named_parameters()) parameters.push_back(entry.key());
  const std::string model = "model.module.";
  const std::string state = "optimizer.state.";
  Tensors found;
  for (const auto& [name, tensor] : stored_tensors(folder)) {
    if (name.starts_with(model)) {
      found.emplace("model." + name.substr(model.size()), tensor);
    } else if (name.starts_with(state)) {
      const auto dot = name.find('.', state.size());
      const auto number = std::stoul(name.substr(state.size(), dot - state.size()));
      found.emplace("optim.state." + parameters.at(number) + name.substr(dot), tensor);
    }
  }
  return found;
}

/// Both compute in fp32, with operators and orders of their own.
void expect_close(const Tensors& found, const Tensors& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (auto a = found.begin(), b = expected.begin(); a != found.end(); ++a, ++b) {
    ASSERT_EQ(a->first, b->first);
    EXPECT_TRUE(at::allclose(a->second, b->second, 1e-4, 1e-6)) << a->first << ":\n" << (a->second - b->second).abs().max();
  }
}

TEST(MegatronFsdp, GoesOnInCppAndBack) {
  if (std::getenv("FSDP_NIGHTLY") == nullptr) GTEST_SKIP() << "takes minutes: set FSDP_NIGHTLY";
  if (!megatron_is_installed()) GTEST_SKIP() << "the package megatron_fsdp is not installed";
  const fsdp::testing::TemporaryFolder folder;
  const auto path = [&](const std::string& name) { return (folder.path() / name).string(); };
  train_in_megatron(Writer::kMegatron, "", path("peer2"), 0, 2);
  train_in_megatron(Writer::kMegatron, path("peer2"), path("peer4"), 2, 2);
  const auto expected = of_megatron(path("peer4"));
  EXPECT_EQ(expected.size(), 4 * 20);
  EXPECT_GT((expected.at("model.head.weight") - of_megatron(path("peer2")).at("model.head.weight")).abs().max().item<float>(), 1e-3);

  train_in_cpp(2, Writer::kMegatron, path("peer2"), path("cpp4"), 2, 2);
  expect_close(of_cpp(path("cpp4")), expected);
  train_in_cpp(4, Writer::kMegatron, path("peer2"), path("cpp4_on_4"), 2, 2);
  expect_close(of_cpp(path("cpp4_on_4")), expected);

  train_in_megatron(Writer::kCpp, path("cpp4"), path("back6"), 4, 2);
  train_in_cpp(2, Writer::kCpp, path("cpp4"), path("cpp6"), 4, 2);
  expect_close(of_megatron(path("back6")), of_cpp(path("cpp6")));
}

}  // namespace megatron_test
