// Models, options and calls that are refused: the message says what is wrong, and what to do.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "fsdp/fsdp.h"
#include "support/messages.h"
#include "support/multi_rank.h"
#include "support/stack.h"

namespace misuse_test {

using fsdp::FullyShardOptions;
using fsdp::Placements;
using fsdp::testing::has;
using fsdp::testing::make_stack;
using fsdp::testing::message_of;
using fsdp::testing::run_ranks;
using fsdp::testing::Stack;
using fsdp::testing::stack_loss;
using fsdp::testing::stack_units;

fsdp::DeviceMesh world(std::chrono::milliseconds timeout = std::chrono::seconds(20)) {
  return fsdp::init_device_mesh("cpu", {{"dp_shard", -1}}, {.timeout = timeout});
}

// Ranks whose models or options differ: refused on every rank, always.

/// fully_shard's message where rank 1's model or options are changed.
void expect_refused(const std::function<void(Stack&, FullyShardOptions&)>& change, const std::string& rank0, const std::string& rank1) {
  for (const int ranks : {2, 4}) {
    run_ranks(ranks, [&](int rank) {
      const auto mesh = world(std::chrono::seconds(5));
      auto model = make_stack({.hidden = {4, 5}});
      FullyShardOptions options{.mesh = mesh, .units = stack_units()};
      if (rank == 1) change(model, options);
      const auto message = message_of([&] { fsdp::fully_shard(*model, options); });
      EXPECT_TRUE(has(message, "fully_shard: rank 0 and rank 1 differ")) << message;
      EXPECT_TRUE(has(message, "Every rank must build the same model and pass the same options")) << message;
      EXPECT_TRUE(has(message, rank0)) << message;
      EXPECT_TRUE(has(message, rank1)) << message;
      // The ranks agreed to disagree: model and mesh are as before.
      mesh.barrier();
      for (const auto& parameter : model->parameters()) EXPECT_TRUE(parameter.has_storage() && parameter.storage().nbytes() > 0);
      auto same = make_stack({.hidden = {4, 5}});
      fsdp::fully_shard(*same, {.mesh = mesh, .units = stack_units()});
      EXPECT_TRUE(std::isfinite(stack_loss(same, 0, rank).item<double>()));
    });
  }
}

TEST(DifferentModels, AreRefusedByEveryRank) {
  expect_refused(
      [](Stack& model, FullyShardOptions&) {
        model->head->weight.set_data(torch::randn({3, 10}));
      },
      "rank 0 has 'unit '(root)': parameter 'head.weight' [2, 10] Float, granularity 0/1'",
      "rank 1 has 'unit '(root)': parameter 'head.weight' [3, 10] Float, granularity 0/1'");
  expect_refused([](Stack& model, FullyShardOptions&) { model->register_parameter("more", torch::randn({1})); },
                 "rank 0 has 'unit '(root)': parameter 'entry.weight'", "rank 1 has 'unit '(root)': parameter 'more' [1]");
  expect_refused([](Stack& model, FullyShardOptions&) { model->to(at::kDouble); }, "[10, 3] Float", "[10, 3] Double");
  expect_refused([](Stack& model, FullyShardOptions&) { model->entry->bias.requires_grad_(false); }, "'entry.bias' [10] Float, granularity",
                 "'entry.bias' [10] Float, frozen, granularity");
  expect_refused([](Stack& model, FullyShardOptions&) { model = make_stack({.hidden = {4}}); }, "'blocks.1.up.weight'", "(no such line)");
}

TEST(DifferentOptions, AreRefusedByEveryRank) {
  expect_refused([](Stack&, FullyShardOptions& options) { options.units = {}; },
                 "rank 0 has 'unit 'blocks.0': parameter 'blocks.0.up.weight'",
                 "rank 1 has 'unit '(root)': parameter 'blocks.0.up.weight'");
  expect_refused([](Stack&, FullyShardOptions& options) { options.placements = Placements::optim_grads(); }, "rank 0 has 'placements 111",
                 "rank 1 has 'placements 011");
  expect_refused([](Stack&, FullyShardOptions& options) { options.reshard_after_forward = false; }, "reshard_after_forward 1",
                 "reshard_after_forward 0");
  expect_refused([](Stack&, FullyShardOptions& options) { options.prefetch_depth = 3; }, "prefetch_depth 1", "prefetch_depth 3");
  expect_refused(
      [](Stack&, FullyShardOptions& options) {
        options.granularity = [](const std::string& name, const at::Tensor&) {
          return name == "entry.weight" ? fsdp::Granularity::rows() : fsdp::Granularity::element();
        };
      },
      "'entry.weight' [10, 3] Float, granularity 0/1", "'entry.weight' [10, 3] Float, granularity 1/1");
  // A unit without parameters of its own is a unit all the same.
  expect_refused(
      [](Stack&, FullyShardOptions& options) {
        options.units = [](const std::string& name, const torch::nn::Module& module) {
          return name == "blocks" || fsdp::testing::stack_units()(name, module);
        };
      },
      "rank 0 has 'unit 'blocks.0'", "rank 1 has 'unit 'blocks'");
}

// What only one rank gets wrong must not leave the others waiting.
TEST(MisuseOnOneRank, IsRefusedByEveryRank) {
  expect_refused([](Stack&, FullyShardOptions& options) { options.prefetch_depth = -1; }, "rank 0 has 'placements", "prefetch_depth -1");
  expect_refused([](Stack& model, FullyShardOptions&) { model->register_parameter("elsewhere", torch::empty({2}, at::kMeta)); },
                 "rank 0 has 'placements", "parameter 'elsewhere' is on meta, the mesh on cpu");
}

// Misuse on all ranks: the message says what and what to do.

template <typename Fn>
void expect_error(const Fn& fn, const std::vector<std::string>& parts) {
  const auto message = message_of(fn);
  for (const auto& part : parts) EXPECT_TRUE(has(message, part)) << message;
}

class Misuse : public ::testing::TestWithParam<int> {};

TEST_P(Misuse, OfFullyShard) {
  run_ranks(GetParam(), [] {
    const auto mesh = world();
    {
      auto model = make_stack();
      fsdp::fully_shard(*model, {.mesh = mesh, .units = stack_units()});
      expect_error([&] { fsdp::fully_shard(*model, {.mesh = mesh}); }, {"'entry.weight'", "is sharded already", "fully_unshard"});
      EXPECT_TRUE(std::isfinite(stack_loss(model, 0, mesh.rank()).item<double>())) << "the first sharding stays";
    }
    {
      auto model = make_stack();
      auto& block = model->blocks->at<fsdp::testing::StackBlockImpl>(1);
      fsdp::fully_shard(block, {.mesh = mesh});
      expect_error([&] { fsdp::fully_shard(*model, {.mesh = mesh}); }, {"'blocks.1.up.weight'", "is sharded already", "on the root"});
    }
    using enum fsdp::Placement;
    for (const Placements wrong : {Placements{kReplicated, kSharded, kReplicated}, Placements{kSharded, kReplicated, kReplicated},
                                   Placements{kSharded, kReplicated, kSharded}, Placements{kSharded, kSharded, kReplicated}}) {
      auto model = make_stack();
      expect_error([&] { fsdp::fully_shard(*model, {.mesh = mesh, .placements = wrong}); },
                   {"placements have no meaning", "no_shard, optim, optim_grads or optim_grads_params"});
    }
    expect_error([] { Placements::from_name("zero3"); }, {"zero3", "optim_grads_params"});
    {
      const auto grid = fsdp::init_device_mesh("cpu", {{"pipeline", 1}, {"dp_outer", 1}, {"dp_shard", -1}});
      auto model = make_stack();
      expect_error([&] { fsdp::fully_shard(*model, {.mesh = grid}); }, {"has 3", "mesh.sub({\"dp_outer\", \"dp_shard\"})"});
      const auto outer = Placements::optim();
      expect_error([&] { fsdp::fully_shard(*model, {.mesh = mesh, .outer_placements = outer}); }, {"needs a mesh with two dimensions"});
      const auto plane = grid.sub({"dp_outer", "dp_shard"});
      expect_error([&] { fsdp::fully_shard(*model, {.mesh = plane, .outer_placements = Placements::optim_grads()}); },
                   {"no meaning on the outer dimension", "HSDP", "HFSDP", "1-D mesh"});
      expect_error([&] { fsdp::fully_shard(*model, {.mesh = plane, .placements = Placements::optim(), .outer_placements = outer}); },
                   {"outer_placements optim", "needs placements optim_grads_params"});
      expect_error([&] { fsdp::fully_shard(*model, {.mesh = mesh, .reshard_after_forward_size = 3}); },
                   {"reshard_after_forward_size 3 must divide", "dp_shard"});
      fsdp::fully_shard(*model, {.mesh = plane});
      EXPECT_TRUE(std::isfinite(stack_loss(model, 0, mesh.rank()).item<double>()));
    }
    {
      auto model = make_stack();
      expect_error([&] { fsdp::fully_shard(*model, {.mesh = mesh, .prefetch_depth = -1}); }, {"prefetch_depth -1", "0 (no read-ahead)"});
      auto sharded = fsdp::fully_shard(*model, {.mesh = mesh});
      expect_error([&] { sharded.set_prefetch_depth(-2); }, {"prefetch_depth -2", "0 (no read-ahead)"});
    }
    {
      auto model = make_stack();
      model->register_parameter("elsewhere", torch::empty({2}, at::kMeta));
      expect_error([&] { fsdp::fully_shard(*model, {.mesh = mesh}); },
                   {"parameter 'elsewhere' is on meta, the mesh on cpu", "move the module there"});
    }
    {
      auto model = make_stack();
      model->register_parameter("sparse", torch::eye(3).to_sparse(), false);
      expect_error([&] { fsdp::fully_shard(*model, {.mesh = mesh}); }, {"parameter 'sparse'", "is not dense"});
    }
    {
      auto model = make_stack();
      model->register_parameter("view", model->head->weight.detach().slice(0, 1), false);
      expect_error([&] { fsdp::fully_shard(*model, {.mesh = mesh}); }, {"'head.weight'", "'view'", "share memory"});
    }
    {
      auto model = make_stack();
      expect_error([&] { fsdp::handle(*model); }, {"StackImpl", "not a unit of a sharded model", "fully_shard"});
      expect_error([&] { fsdp::AdamW optimizer(*model); }, {"not a unit of a sharded model"});
    }
  });
}

// fully_shard refuses before it changes anything.
TEST_P(Misuse, LeavesTheModelWhole) {
  run_ranks(GetParam(), [] {
    const auto mesh = world();
    auto model = make_stack();
    const auto loss = stack_loss(model, 0, mesh.rank()).item<double>();
    expect_error(
        [&] {
          fsdp::fully_shard(*model, {.mesh = mesh, .units = stack_units(), .granularity = [](const std::string& name, const at::Tensor&) {
                                       return name == "blocks.2.up.weight" ? fsdp::Granularity::blocks(0) : fsdp::Granularity::element();
                                     }});
        },
        {"parameter 'blocks.2.up.weight'", "blocks of 0 elements"});
    EXPECT_EQ(stack_loss(model, 0, mesh.rank()).item<double>(), loss);
    fsdp::fully_shard(*model, {.mesh = mesh, .units = stack_units()});
    EXPECT_EQ(stack_loss(model, 0, mesh.rank()).item<double>(), loss);
  });
}

TEST_P(Misuse, SparseGradient) {
  run_ranks(GetParam(), [] {
    const auto mesh = world();
    torch::manual_seed(0);
    torch::nn::Sequential model(torch::nn::Embedding(torch::nn::EmbeddingOptions(10, 4).sparse(true)), torch::nn::Linear(4, 2));
    auto sharded = fsdp::fully_shard(*model, {.mesh = mesh, .units = fsdp::each<torch::nn::LinearImpl>()});
    const auto tokens = torch::arange(5);
    expect_error([&] { model->forward(tokens).sum().backward(); },
                 {"parameter '0.weight' of unit '(root)'", "sparse gradient", "sparse(false)"});
    EXPECT_FALSE(model->ptr<torch::nn::EmbeddingImpl>(0)->weight.grad().defined());
    // Without it, the model trains.
    model->ptr<torch::nn::EmbeddingImpl>(0)->options.sparse(false);
    model->forward(tokens).sum().backward();
    const auto gradients = sharded.full_gradients();
    EXPECT_TRUE(gradients[0].second.defined());
    EXPECT_TRUE(gradients[1].second.defined());
  });
}

/// As set_data does it, without the operator by which that is noticed.
void give_memory(const at::Tensor& parameter, const at::Tensor& value) {
  parameter.unsafeGetTensorImpl()->shallow_copy_from(value.getIntrusivePtr());
}

TEST_P(Misuse, OtherMemoryAfterSharding) {
  run_ranks(GetParam(), [] {
    const auto mesh = world();
    {
      auto model = make_stack();
      fsdp::fully_shard(*model, {.mesh = mesh, .units = stack_units()});
      auto weight = model->blocks->at<fsdp::testing::StackBlockImpl>(1).up->weight;
      give_memory(weight, torch::zeros(weight.sizes()));
      // When the forward begins, before anything is computed.
      expect_error([&] { stack_loss(model, 0, mesh.rank()); }, {"parameter 'blocks.1.up.weight' of unit 'blocks.1'", "other memory"});
    }
    {
      auto model = make_stack();
      auto sharded = fsdp::fully_shard(*model, {.mesh = mesh, .units = stack_units()});
      fsdp::AdamW optimizer(*model);
      stack_loss(model, 0, mesh.rank()).backward();
      fsdp::AsyncSaver saver(*model);
      for (const auto& parameter : model->parameters()) give_memory(parameter, torch::zeros(parameter.sizes()));
      const auto refused = [](const auto& fn) { expect_error(fn, {"parameter 'entry.weight' of unit '(root)'", "other memory"}); };
      refused([&] { model->forward(torch::ones({2, 3})).sum().backward(); });
      // Every way out of the model, and into it.
      refused([&] { optimizer.step(); });
      refused([&] { fsdp::save("/never/written", *model); });
      refused([&] { saver.save("/never/written"); });
      refused([&] { fsdp::export_safetensors("/never/written", *model); });
      refused([&] { fsdp::load("/never/read", *model); });
      refused([&] { (void)sharded.full_parameters(); });
      refused([&] { (void)sharded.parameter_shards(); });
      refused([&] { (void)sharded.full_gradients(); });
      refused([&] { (void)sharded.gradient_shards(); });
      refused([&] { sharded.scale_gradients(2); });
      refused([&] { (void)sharded.clip_grad_norm(1); });
      refused([&] { (void)fsdp::gradient_norms(*model); });
      refused([&] { (void)fsdp::parameter_norms(*model); });
    }
    {
      auto model = make_stack();
      fsdp::fully_shard(*model, {.mesh = mesh, .units = stack_units()});
      give_memory(model->head->bias, torch::zeros({2}));
      expect_error([&] { const fsdp::SummonFullParams whole(*model); }, {"parameter 'head.bias' of unit '(root)'", "other memory"});
    }
  });
}

TEST_P(Misuse, AGradientForAParameterThatWasFrozen) {
  run_ranks(GetParam(), [] {
    const auto mesh = world();
    auto model = make_stack();
    model->head->bias.requires_grad_(false);
    fsdp::fully_shard(*model, {.mesh = mesh, .units = stack_units()});
    model->head->bias.requires_grad_(true);
    expect_error([&] { stack_loss(model, 0, mesh.rank()).backward(); },
                 {"parameter 'head.bias' of unit '(root)'", "did not require one", "set requires_grad before sharding"});
  });
}

TEST_P(Misuse, AParameterAfterItsModel) {
  run_ranks(GetParam(), [] {
    const auto mesh = world();
    at::Tensor view;
    {
      auto model = make_stack();
      fsdp::fully_shard(*model, {.mesh = mesh});
      view = model->head->weight.detach();
    }
    expect_error([&] { view.sum(); }, {"after the model is gone"});
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Misuse, ::testing::Values(1, 2, 4), [](const auto& info) { return std::to_string(info.param); });

}  // namespace misuse_test
