// What a strict load asks for: all of the model, and all of the optimizer's state. Nothing is reset because a name is missing.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "fsdp/fsdp.h"
#include "optim/shard_optimizer.h"
#include "support/edited_checkpoint.h"
#include "support/messages.h"
#include "support/multi_rank.h"
#include "support/same_bits.h"
#include "support/stack.h"
#include "support/stored.h"
#include "support/temporary_folder.h"
#include "support/training.h"

namespace strict_test {

namespace fs = std::filesystem;

using fsdp::testing::adamw;
using fsdp::testing::edit_metadata;
using fsdp::testing::expect_same_bits;
using fsdp::testing::has;
using fsdp::testing::make;
using fsdp::testing::MakeOptimizer;
using fsdp::testing::message_of;
using fsdp::testing::remove_item;
using fsdp::testing::run_ranks;
using fsdp::testing::stored_tensors;
using fsdp::testing::Training;

class Strict : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return (folder.path() / name).string(); }

  /// A copy of a checkpoint that rank 0 has changed.
  std::string changed(const Training& run, const std::string& from, const std::string& name,
                      const std::function<void(const fs::path&)>& change) {
    if (run.mesh.rank() == 0) {
      fs::copy(path(from), path(name));
      change(path(name));
    }
    run.mesh.barrier();
    return path(name);
  }

  fsdp::testing::TemporaryFolder folder;
};

/// As Python's optimizers leave it.
void drop_own(const fs::path& step) {
  edit_metadata(step, [](fsdp::ckpt::DcpMetadata& metadata) {
    std::erase_if(metadata.items, [](const auto& item) { return item.name.starts_with("fsdp."); });
    metadata.paths.clear();
  });
}

TEST_F(Strict, AMissingCountOrMomentIsAnError) {
  struct Case {
    std::string name;
    MakeOptimizer make_optimizer;
    std::vector<std::string> kinds;
  };
  const std::vector<Case> cases = {{"AdamW", adamw(), {"step", "exp_avg", "exp_avg_sq"}},
                                   {"SGD", make<fsdp::SGD>(fsdp::SGDOptions{.lr = 1e-2, .momentum = 0.9}), {"momentum_buffer"}}};
  run_ranks(2, [&] {
    for (const auto& [name, make_optimizer, kinds] : cases) {
      SCOPED_TRACE(name);
      Training run({}, make_optimizer);
      run.train(0, 2);
      fsdp::save(path(name), *run.model, *run.optimizer);
      for (const bool is_python : {false, true}) {
        for (const auto& kind : kinds) {
          const auto key = "optim.state.entry.weight." + kind;
          SCOPED_TRACE(key);
          const auto from = changed(run, name, name + kind + (is_python ? "-python" : ""), [&, name = name](const fs::path& step) {
            if (is_python) drop_own(step);
            remove_item(step, key);
            // Torch's SGD counts nothing: its momentum alone says that there was an update.
            if (is_python && name == "SGD") remove_item(step, "optim.state.head.weight.step");
          });
          const auto before = run.handle->full_parameters();
          const auto message = message_of([&] { fsdp::load(from, *run.model, *run.optimizer); });
          EXPECT_TRUE(has(message, "missing in the checkpoint:\n    " + key + "\n")) << message;
          expect_same_bits(run.handle->full_parameters(), before);
          // By request it stays as it was.
          const auto loaded = fsdp::load(from, *run.model, *run.optimizer, {.strict = false});
          // A moment is missed by the rank that would have read it.
          EXPECT_TRUE(loaded.missing.empty() ? kind != "step" : loaded.missing == std::vector<std::string>{key});
          const auto& algorithm = *run.optimizer->state().algorithms.front();
          for (const auto& unit : run.handle->engine()->units()) {
            for (std::size_t i = 0; i < unit->parameters.size(); ++i) EXPECT_GT(algorithm.steps(*unit, i), 0) << unit->parameters[i].name;
          }
        }
      }
    }
  });
}

TEST_F(Strict, AllStateOfAParameterMayNotBeMissing) {
  run_ranks(2, [&] {
    Training run;
    run.train(0, 1);
    fsdp::save(path("1"), *run.model, *run.optimizer);
    const std::vector<std::string> keys = {"exp_avg", "exp_avg_sq", "step"};
    for (const bool is_python : {false, true}) {
      const auto from = changed(run, "1", is_python ? "python" : "cpp", [&](const fs::path& step) {
        if (is_python) {
          drop_own(step);
          // The optimizer did not have this parameter at all.
          remove_item(step, "optim.param_groups.0.params");
        }
        for (const auto& key : keys) remove_item(step, "optim.state.entry.weight." + key);
      });
      const auto message = message_of([&] { fsdp::load(from, *run.model, *run.optimizer); });
      std::string names;
      for (const auto& key : keys) names += "\n    optim.state.entry.weight." + key;
      EXPECT_TRUE(has(message, "missing in the checkpoint:" + names + "\n")) << message;
    }
  });
}

// A parameter that was never updated has no state, and that is no fault.
TEST_F(Strict, WhatWasNeverUpdatedHasNoState) {
  run_ranks(2, [&] {
    Training run;
    // Nothing leads from the last block to this loss.
    const auto train = [](Training& some) {
      some.model->entry(torch::ones({4, 3})).square().mean().backward();
      some.optimizer->step();
      some.optimizer->zero_grad();
    };
    train(run);
    fsdp::save(path("1"), *run.model, *run.optimizer);
    const auto stored = stored_tensors(path("1"));
    EXPECT_EQ(stored.at("optim.state.head.weight.step").item<float>(), 0);
    EXPECT_FALSE(stored.contains("optim.state.head.weight.exp_avg"));
    const auto python = changed(run, "1", "python", [&](const fs::path& step) {
      drop_own(step);
      remove_item(step, "optim.state.head.weight.step");
    });
    for (const auto& from : {path("1"), python}) {
      Training other({}, adamw(), 12);
      other.train(0, 2);
      fsdp::load(from, *other.model, *other.optimizer);
      const auto& algorithm = *other.optimizer->state().algorithms.front();
      for (const auto& unit : other.handle->engine()->units()) {
        for (std::size_t i = 0; i < unit->parameters.size(); ++i) {
          EXPECT_EQ(algorithm.steps(*unit, i), unit->parameters[i].name.starts_with("entry.") ? 1 : 0) << unit->parameters[i].name;
        }
      }
    }
  });
}

// Nor is it one to have no elements: one rank writes the count.
TEST_F(Strict, AParameterWithoutElementsHasACount) {
  struct Net : torch::nn::Module {
    Net() : linear(register_module("linear", torch::nn::Linear(3, 2))), empty(register_parameter("empty", torch::empty({0, 4}))) {}
    torch::nn::Linear linear;
    at::Tensor empty;
  };
  for (const int ranks : {1, 2, 4}) {
    run_ranks(ranks, [&] {
      const auto mesh = ranks < 4 ? fsdp::testing::line() : fsdp::init_device_mesh("cpu", {{"dp_outer", 2}, {"dp_shard", 2}});
      const auto where = path(std::to_string(ranks));
      const auto run = [&](auto use) {
        Net net;
        const auto sharded = fsdp::fully_shard(net, {.mesh = mesh});
        fsdp::AdamW optimizer(net);
        use(net, optimizer);
      };
      run([&](Net& net, fsdp::AdamW& optimizer) {
        (net.linear(torch::ones({2, 3})).sum() + net.empty.sum()).backward();
        optimizer.step();
        fsdp::save(where, net, optimizer);
        EXPECT_EQ(stored_tensors(where).at("optim.state.empty.step").item<float>(), 1);
      });
      run([&](Net& net, fsdp::AdamW& optimizer) { EXPECT_NO_THROW(fsdp::load(where, net, optimizer)); });
    });
  }
}

}  // namespace strict_test
