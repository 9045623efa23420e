// Checkpoints of torch::optim optimizers that run on shards: a run goes on as if nothing had been, on any number of ranks.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "engine/stack.h"
#include "example/temporary_folder.h"
#include "fsdp/error.h"
#include "fsdp/save_load.h"
#include "multi_rank.h"
#include "state/stored.h"

namespace wrapped_test {

namespace fs = std::filesystem;
namespace optim = torch::optim;

using fsdp::testing::run_ranks;
using fsdp::testing::same_bits;
using fsdp::testing::stored_tensors;

template <typename Optimizer, typename Options>
fsdp::TorchOptimizerFactory make(Options options) {
  return [options](std::vector<at::Tensor> shards) { return std::make_unique<Optimizer>(std::move(shards), options); };
}

struct Algorithm {
  std::string name;
  fsdp::TorchOptimizerFactory factory;
  std::set<std::string> state;  ///< Of each parameter, beside its count.
};

std::vector<Algorithm> algorithms() {
  return {{"Adam", make<optim::Adam>(optim::AdamOptions(1e-2)), {"exp_avg", "exp_avg_sq"}},
          {"Adam with amsgrad",
           make<optim::Adam>(optim::AdamOptions(1e-2).amsgrad(true).weight_decay(0.1)),
           {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}},
          {"AdamW", make<optim::AdamW>(optim::AdamWOptions(1e-2)), {"exp_avg", "exp_avg_sq"}},
          {"SGD", make<optim::SGD>(optim::SGDOptions(1e-2)), {}},
          {"SGD with momentum", make<optim::SGD>(optim::SGDOptions(1e-2).momentum(0.9).dampening(0.5)), {"momentum_buffer"}},
          {"RMSprop", make<optim::RMSprop>(optim::RMSpropOptions(1e-2)), {"square_avg"}},
          {"RMSprop with all",
           make<optim::RMSprop>(optim::RMSpropOptions(1e-2).momentum(0.9).centered(true)),
           {"square_avg", "momentum_buffer", "grad_avg"}},
          {"Adagrad", make<optim::Adagrad>(optim::AdagradOptions(1e-2).lr_decay(0.1).initial_accumulator_value(0.5)), {"sum"}}};
}

struct Training {
  explicit Training(const fsdp::TorchOptimizerFactory& factory, std::uint64_t seed = 11) : model(nullptr) {
    torch::manual_seed(seed);
    model = fsdp::testing::Stack(fsdp::testing::StackOptions{});
    handle = std::make_unique<fsdp::FSDPModule>(fsdp::fully_shard(*model, {.mesh = mesh, .units = fsdp::testing::stack_units()}));
    optimizer = std::make_unique<fsdp::WrappedOptimizer>(fsdp::wrap(*model, factory));
  }
  void train(int from, int to) {
    for (int step = from; step < to; ++step) {
      fsdp::testing::stack_loss(model, step, mesh.rank()).backward();
      optimizer->step();
      optimizer->zero_grad();
    }
  }

  fsdp::DeviceMesh mesh = fsdp::init_device_mesh("cpu", {{"dp_shard", -1}});
  fsdp::testing::Stack model;
  std::unique_ptr<fsdp::FSDPModule> handle;
  std::unique_ptr<fsdp::WrappedOptimizer> optimizer;
};

using Named = std::vector<std::pair<std::string, at::Tensor>>;

void expect_same(const Named& a, const Named& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(same_bits(a[i].second, b[i].second)) << a[i].first;
}

/// Without what depends on the number of ranks.
std::map<std::string, at::Tensor> stored_state(const std::string& path) {
  auto tensors = stored_tensors(path);
  std::erase_if(tensors, [](const auto& entry) { return entry.first.starts_with("fsdp.rng."); });
  return tensors;
}

std::string error_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const fsdp::Error& error) {
    return error.what();
  }
  return "no error";
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

class Wrapped : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return (folder.path() / name).string(); }
  fsdp::testing::TemporaryFolder folder;
};

TEST_F(Wrapped, ARunContinuesBitForBit) {
  for (const int ranks : {1, 2, 4}) {
    run_ranks(ranks, [&] {
      for (const auto& [name, factory, kinds] : algorithms()) {
        const auto step = path(std::to_string(ranks) + name);
        SCOPED_TRACE(step);
        Training run(factory);
        run.train(0, 2);
        run.optimizer->set_lr_factor(0.5);
        fsdp::save(step, *run.model, *run.optimizer);
        run.train(2, 4);
        Training fresh(factory, 12);
        fsdp::load(step, *fresh.model, *fresh.optimizer);
        EXPECT_EQ(fresh.optimizer->lr(), run.optimizer->lr());
        fresh.train(2, 4);
        expect_same(fresh.handle->full_parameters(), run.handle->full_parameters());
        Training used(factory, 12);
        used.train(7, 10);
        fsdp::load(step, *used.model, *used.optimizer);
        used.train(2, 4);
        expect_same(used.handle->full_parameters(), run.handle->full_parameters());
      }
    });
  }
}

TEST_F(Wrapped, OtherNumbersOfRanksReadTheSameTensors) {
  for (const auto& [name, factory, kinds] : algorithms()) {
    SCOPED_TRACE(name);
    const auto& make_optimizer = factory;
    run_ranks(4, [&, &name = name] {
      Training run(make_optimizer);
      run.train(0, 2);
      fsdp::save(path(name), *run.model, *run.optimizer);
    });
    const auto written = stored_state(path(name));
    std::set<std::string> found;
    for (const auto& [key, tensor] : written) {
      const std::string prefix = "optim.state.blocks.1.up.weight.";
      if (key.starts_with(prefix)) found.insert(key.substr(prefix.size()));
    }
    auto expected = kinds;
    if (!kinds.empty()) expected.insert("step");
    EXPECT_EQ(found, expected);
    for (const int ranks : {1, 2, 3}) {
      const auto again = path(name + " on " + std::to_string(ranks));
      run_ranks(ranks, [&, &name = name] {
        Training run(make_optimizer, 12);
        fsdp::load(path(name), *run.model, *run.optimizer);
        fsdp::AsyncSaver saver(*run.model, run.optimizer.get());
        saver.save(again);
        saver.wait();
      });
      const auto read = stored_state(again);
      ASSERT_EQ(read.size(), written.size());
      for (const auto& [key, tensor] : written) EXPECT_TRUE(same_bits(read.at(key), tensor)) << key;
    }
  }
}

TEST_F(Wrapped, ALoadThatFailsLeavesTheStateAsItWas) {
  run_ranks(2, [&](int rank) {
    for (const auto& [name, factory, kinds] : algorithms()) {
      for (const int steps : {0, 2}) {
        const auto step = path(name + std::to_string(steps));
        SCOPED_TRACE(step);
        Training saved(factory, 12);
        saved.train(0, 2 - steps);  // Some have no state yet where the other one has, and the reverse.
        fsdp::save(step, *saved.model, *saved.optimizer, {}, {.rng = false});
        saved.mesh.barrier();
        if (rank == 0) {
          const auto file = fs::path(step) / "__1_0.distcp";
          std::fstream bytes(file, std::ios::in | std::ios::out | std::ios::binary);
          bytes.seekp(static_cast<std::streamoff>(fs::file_size(file)) - 1);
          bytes.put('!');
        }
        saved.mesh.barrier();
        Training run(factory);
        run.train(0, steps);
        EXPECT_TRUE(has(error_of([&] { fsdp::load(step, *run.model, *run.optimizer); }), "nothing was loaded"));
        run.train(steps, 4);
        Training untouched(factory);
        untouched.train(0, 4);
        expect_same(run.handle->full_parameters(), untouched.handle->full_parameters());
      }
    }
  });
}

TEST_F(Wrapped, StateThatIsNotPerElementIsRefused) {
  run_ranks(2, [&] {
    Training run([](std::vector<at::Tensor> shards) { return std::make_unique<optim::LBFGS>(std::move(shards)); });
    const auto message = error_of([&] { fsdp::save(path("1"), *run.model, *run.optimizer); });
    EXPECT_TRUE(has(message, "nothing was saved:") && has(message, "LBFGS has one history of all parameters")) << message;
    fsdp::save(path("1"), *run.model);
    EXPECT_TRUE(has(error_of([&] { fsdp::load(path("1"), *run.model, *run.optimizer); }), "nothing was loaded:"));
    fsdp::load(path("1"), *run.model);
  });
}

}  // namespace wrapped_test
