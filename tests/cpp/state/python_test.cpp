// Hand-overs between C++ and Python, exact in both directions: C++ on 4 ranks, Python's DCP in one process, FSDP2 on 2 ranks, C++ on 3.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <string>

#include "fsdp/save_load.h"
#include "support/multi_rank.h"
#include "support/python_peer.h"
#include "support/same_bits.h"
#include "support/stack.h"
#include "support/stored.h"
#include "support/temporary_folder.h"
#include "test_paths.h"

namespace python_test {

using fsdp::testing::expect_same_bits;
using fsdp::testing::make_stack;
using fsdp::testing::run_peer;
using fsdp::testing::run_ranks;
using fsdp::testing::same_bits;
using fsdp::testing::stack_loss;
using fsdp::testing::stack_units;
using fsdp::testing::stored_tensors;

using Tensors = std::map<std::string, at::Tensor>;

/// What both languages have: the model, and the optimizer's state.
Tensors of_both(Tensors tensors) {
  std::erase_if(tensors, [](const auto& entry) { return !entry.first.starts_with("model.") && !entry.first.starts_with("optim.state."); });
  return tensors;
}

TEST(WithPython, RunsGoFromOneToTheOtherAndBack) {
  const fsdp::testing::TemporaryFolder folder;
  const auto path = [&](const std::string& name) { return (folder.path() / name).string(); };
  const auto train = [](int rank, fsdp::testing::Stack& model, fsdp::Optimizer& optimizer) {
    for (int step = 0; step < 2; ++step) {
      stack_loss(model, step, rank).backward();
      optimizer.step();
      optimizer.zero_grad();
    }
  };
  const auto model_with_buffer = [] {
    auto model = make_stack();
    model->register_buffer("counts", torch::arange(6).view({3, 2}).to(at::kFloat));
    return model;
  };
  run_ranks(4, [&](int rank) {
    auto model = model_with_buffer();
    fsdp::fully_shard(*model, {.mesh = fsdp::init_device_mesh("cpu", {{"dp_shard", -1}}), .units = stack_units()});
    fsdp::AdamW optimizer(*model, {.lr = 1e-2});
    train(rank, model, optimizer);
    fsdp::save(path("cpp"), *model, optimizer, {{"step", std::int64_t{2}}, {"name", std::string("a run")}});
  });
  const auto written = stored_tensors(path("cpp"));

  run_peer(fsdp::testing::kStatePeer, {"plain", path("cpp"), path("plain")});
  expect_same_bits(stored_tensors(path("plain")), written);

  run_peer(fsdp::testing::kStatePeer, {"fsdp2", path("cpp"), path("fsdp2")}, 2);
  expect_same_bits(of_both(stored_tensors(path("fsdp2/0"))), of_both(written));
  const auto trained = stored_tensors(path("fsdp2/3"));
  EXPECT_FALSE(same_bits(trained.at("model.entry.weight"), written.at("model.entry.weight")));
  EXPECT_EQ(trained.at("optim.state.entry.weight.step").item<float>(), 5);

  run_ranks(3, [&](int rank) {
    auto model = model_with_buffer();
    fsdp::fully_shard(*model, {.mesh = fsdp::init_device_mesh("cpu", {{"dp_shard", -1}}), .units = stack_units()});
    fsdp::AdamW optimizer(*model, {.lr = 1e-2});
    const auto loaded = fsdp::load(path("fsdp2/3"), *model, optimizer);
    EXPECT_FALSE(loaded.rng);
    fsdp::save(path("back"), *model, optimizer);
    train(rank, model, optimizer);
    fsdp::save(path("trained"), *model, optimizer);
  });
  expect_same_bits(of_both(stored_tensors(path("back"))), of_both(trained));
  EXPECT_EQ(stored_tensors(path("trained")).at("optim.state.entry.weight.step").item<float>(), 7);
}

}  // namespace python_test
