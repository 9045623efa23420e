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

#include "fsdp/error.h"
#include "fsdp/save_load.h"
#include "support/messages.h"
#include "support/multi_rank.h"
#include "support/same_bits.h"
#include "support/stack.h"
#include "support/stored.h"
#include "support/temporary_folder.h"
#include "support/training.h"

namespace wrapped_test {

namespace fs = std::filesystem;
namespace optim = torch::optim;

using fsdp::testing::expect_same_bits;
using fsdp::testing::has;
using fsdp::testing::make;
using fsdp::testing::MakeOptimizer;
using fsdp::testing::message_of;
using fsdp::testing::run_ranks;
using fsdp::testing::same_bits;
using fsdp::testing::stored_tensors;
using fsdp::testing::Training;

template <typename Optimizer, typename Options>
MakeOptimizer wrapped(Options options) {
  return make<fsdp::WrappedOptimizer>(fsdp::TorchOptimizerFactory(
      [options](std::vector<at::Tensor> shards) { return std::make_unique<Optimizer>(std::move(shards), options); }));
}

struct Algorithm {
  std::string name;
  MakeOptimizer make_optimizer;
  std::set<std::string> state;  ///< Of each parameter, beside its count.
};

std::vector<Algorithm> algorithms() {
  return {{"Adam", wrapped<optim::Adam>(optim::AdamOptions(1e-2)), {"exp_avg", "exp_avg_sq"}},
          {"Adam with amsgrad",
           wrapped<optim::Adam>(optim::AdamOptions(1e-2).amsgrad(true).weight_decay(0.1)),
           {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}},
          {"AdamW", wrapped<optim::AdamW>(optim::AdamWOptions(1e-2)), {"exp_avg", "exp_avg_sq"}},
          {"SGD", wrapped<optim::SGD>(optim::SGDOptions(1e-2)), {}},
          {"SGD with momentum", wrapped<optim::SGD>(optim::SGDOptions(1e-2).momentum(0.9).dampening(0.5)), {"momentum_buffer"}},
          {"RMSprop", wrapped<optim::RMSprop>(optim::RMSpropOptions(1e-2)), {"square_avg"}},
          {"RMSprop with all",
           wrapped<optim::RMSprop>(optim::RMSpropOptions(1e-2).momentum(0.9).centered(true)),
           {"square_avg", "momentum_buffer", "grad_avg"}},
          {"Adagrad", wrapped<optim::Adagrad>(optim::AdagradOptions(1e-2).lr_decay(0.1).initial_accumulator_value(0.5)), {"sum"}}};
}

/// Without what depends on the number of ranks.
std::map<std::string, at::Tensor> stored_state(const std::string& path) {
  auto tensors = stored_tensors(path);
  std::erase_if(tensors, [](const auto& entry) { return entry.first.starts_with("fsdp.rng."); });
  return tensors;
}

class Wrapped : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return (folder.path() / name).string(); }
  fsdp::testing::TemporaryFolder folder;
};

TEST_F(Wrapped, ARunContinuesBitForBit) {
  for (const int ranks : {1, 2, 4}) {
    run_ranks(ranks, [&] {
      for (const auto& [name, make_optimizer, kinds] : algorithms()) {
        const auto step = path(std::to_string(ranks) + name);
        SCOPED_TRACE(step);
        Training run({}, make_optimizer);
        run.train(0, 2);
        run.optimizer->set_lr_factor(0.5);
        fsdp::save(step, *run.model, *run.optimizer);
        run.train(2, 4);
        Training fresh({}, make_optimizer, 12);
        fsdp::load(step, *fresh.model, *fresh.optimizer);
        EXPECT_EQ(fresh.optimizer->lr(), run.optimizer->lr());
        fresh.train(2, 4);
        expect_same_bits(fresh.handle->full_parameters(), run.handle->full_parameters());
        Training used({}, make_optimizer, 12);
        used.train(7, 10);
        fsdp::load(step, *used.model, *used.optimizer);
        used.train(2, 4);
        expect_same_bits(used.handle->full_parameters(), run.handle->full_parameters());
      }
    });
  }
}

TEST_F(Wrapped, OtherNumbersOfRanksReadTheSameTensors) {
  for (const auto& [name, make_optimizer, kinds] : algorithms()) {
    SCOPED_TRACE(name);
    run_ranks(4, [&, &name = name, &make_optimizer = make_optimizer] {
      Training run({}, make_optimizer);
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
      run_ranks(ranks, [&, &name = name, &make_optimizer = make_optimizer] {
        Training run({}, make_optimizer, 12);
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
    for (const auto& [name, make_optimizer, kinds] : algorithms()) {
      for (const int steps : {0, 2}) {
        const auto step = path(name + std::to_string(steps));
        SCOPED_TRACE(step);
        Training saved({}, make_optimizer, 12);
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
        Training run({}, make_optimizer);
        run.train(0, steps);
        run.handle->main_parameters_changed();  // A new model, which was not written, would be loaded in one reading.
        EXPECT_TRUE(has(message_of([&] { fsdp::load(step, *run.model, *run.optimizer); }), "nothing was loaded"));
        run.train(steps, 4);
        Training untouched({}, make_optimizer);
        untouched.train(0, 4);
        expect_same_bits(run.handle->full_parameters(), untouched.handle->full_parameters());
      }
    }
  });
}

TEST_F(Wrapped, StateThatIsNotPerElementIsRefused) {
  run_ranks(2, [&] {
    Training run({}, wrapped<optim::LBFGS>(optim::LBFGSOptions()));
    const auto message = message_of([&] { fsdp::save(path("1"), *run.model, *run.optimizer); });
    EXPECT_TRUE(has(message, "nothing was saved:") && has(message, "LBFGS has one history of all parameters")) << message;
    fsdp::save(path("1"), *run.model);
    EXPECT_TRUE(has(message_of([&] { fsdp::load(path("1"), *run.model, *run.optimizer); }), "nothing was loaded:"));
    fsdp::load(path("1"), *run.model);
  });
}

}  // namespace wrapped_test
