// The life of a sharded model: sharded, misused, converted, un-sharded, outlived, freed.

#include "fsdp/fully_shard.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/trap_key.h"
#include "fsdp/fsdp.h"
#include "paging/paged_storage.h"
#include "support/twins.h"

namespace fsdp {
namespace fully_shard_test {

using testing::all_strategies;
using testing::batch;
using testing::each_linear;
using testing::expect_same;
using testing::expect_same_bits;
using testing::has;
using testing::line;
using testing::make_net;
using testing::message_of;
using testing::Net;
using testing::over_ranks;
using testing::values_of;

TEST(FullyShard, ParametersKeepTheirIdentityAndHoldNoMemory) {
  over_ranks([] {
    const auto mesh = line();
    const auto model = make_net();
    const auto before = model->parameters();
    const auto sharded = fully_shard(*model, {.mesh = mesh, .units = each_linear()});
    const auto after = model->parameters();
    ASSERT_EQ(after.size(), before.size());
    for (std::size_t i = 0; i < after.size(); ++i) EXPECT_TRUE(after[i].is_same(before[i]));
    const auto stats = sharded.memory_stats();
    EXPECT_EQ(stats.gathered_parameters.peak, 0);
    EXPECT_EQ(sharded.wire_stats().all_gathers, 0);
    std::int64_t bytes = 0;
    for (const auto& unit : sharded.engine()->units()) bytes += unit->layout.shard_bytes();
    EXPECT_EQ(stats.main_parameters.live, bytes);
    EXPECT_GE(bytes * mesh.size(), 4 * (60 + 10 + 100 + 10 + 30 + 3));
  });
}

TEST(FullyShard, ShardsCoverEveryParameterOnce) {
  over_ranks([](int rank) {
    const auto mesh = line();
    const auto plain = make_net();
    const auto model = make_net();
    const auto sharded = fully_shard(*model, {.mesh = mesh, .units = each_linear()});
    const auto shards = sharded.parameter_shards();
    ASSERT_EQ(shards.size(), 6U);
    for (const auto& shard : shards) {
      const auto whole = plain->named_parameters()[shard.name].detach();
      EXPECT_EQ(shard.shape, whole.sizes().vec()) << shard.name;
      EXPECT_TRUE(torch::equal(shard.value, whole.view(-1).narrow(0, shard.offset, shard.value.numel()))) << shard.name;
      EXPECT_EQ(mesh.sum(static_cast<double>(shard.value.numel())), static_cast<double>(whole.numel())) << shard.name << " on " << rank;
    }
  });
}

TEST(FullyShard, Handles) {
  testing::run_ranks(2, [] {
    const auto model = make_net();
    EXPECT_TRUE(has(message_of([&] { handle(*model); }), "call fsdp::fully_shard"));
    EXPECT_TRUE(has(message_of([&] { fully_unshard(*model); }), "call fsdp::fully_shard"));
    EXPECT_TRUE(has(message_of([&] { memory_stats(*model); }), "call fsdp::fully_shard"));
    EXPECT_TRUE(has(message_of([&] { AdamW optimizer(*model); }), "call fsdp::fully_shard"));
    EXPECT_TRUE(has(message_of([&] { clip_grad_norm(*model, 1); }), "call fsdp::fully_shard"));
    const auto sharded = fully_shard(*model, {.units = [](const std::string& name, const torch::nn::Module&) { return name == "second"; }});
    EXPECT_EQ(handle(*model).engine(), sharded.engine());
    EXPECT_EQ(handle(*model->second).engine(), sharded.engine());
    EXPECT_TRUE(has(message_of([&] { handle(*model->first); }), "is not a unit"));

    // A handle is for its own unit.
    handle(*model->second).unshard();
    EXPECT_NO_THROW(model->second->weight.data_ptr());
    EXPECT_THROW(model->first->weight.data_ptr(), c10::Error);
    handle(*model->second).reshard();
    EXPECT_THROW(model->second->weight.data_ptr(), c10::Error);
  });
}

TEST(FullyShard, RefusesWhatItCannotShard) {
  over_ranks([] {
    const auto mesh = line();
    const auto refusal = [&](torch::nn::Module& module, FullyShardOptions options = {}) {
      options.mesh = mesh;
      return message_of([&] { fully_shard(module, options); });
    };
    {
      const auto model = make_net();
      const auto first = fully_shard(*model->first, {.mesh = mesh});
      EXPECT_TRUE(has(refusal(*model->first), "'weight' is sharded already")) << refusal(*model->first);
      EXPECT_TRUE(has(refusal(*model), "'first.weight' is sharded already")) << refusal(*model);
      // A refused call leaves the rest as it was.
      EXPECT_NO_THROW(model->second->weight.data_ptr());
    }
    struct Views : torch::nn::Module {
      Views() {
        register_parameter("whole", at::zeros({4, 4}));
        register_parameter("part", parameters()[0].detach()[2]);
      }
    };
    Views views;
    EXPECT_TRUE(has(refusal(views), "'whole' and 'part' share memory") || has(refusal(views), "'part' and 'whole' share memory"))
        << refusal(views);
    struct Sparse : torch::nn::Module {
      Sparse() { register_parameter("sparse", at::zeros({4, 4}).to_sparse()); }
    };
    Sparse sparse;
    EXPECT_TRUE(has(refusal(sparse), "'sparse' is not dense")) << refusal(sparse);
    struct Meta : torch::nn::Module {
      Meta() { register_parameter("meta", at::zeros({4, 4}, at::kMeta)); }
    };
    Meta meta;
    EXPECT_TRUE(has(refusal(meta), "'meta' is on meta")) << refusal(meta);
    struct Complex : torch::nn::Module {
      explicit Complex(bool trainable) { register_parameter("complex", at::ones({4, 4}, at::kComplexFloat), trainable); }
    };
    Complex complex(true);
    EXPECT_TRUE(has(refusal(complex), "'complex' has dtype ComplexFloat")) << refusal(complex);
    Complex frozen(false);
    EXPECT_EQ(refusal(frozen), "no error");
    EXPECT_EQ(frozen.parameters()[0].sum().item<c10::complex<float>>(), c10::complex<float>(16));

    Net net;
    EXPECT_TRUE(has(refusal(net, {.placements = {Placement::kSharded, Placement::kReplicated, Placement::kSharded}}), "no meaning"));
    EXPECT_TRUE(has(refusal(net, {.prefetch_depth = -1}), "prefetch_depth -1"));
    EXPECT_EQ(refusal(net), "no error");
  });
  testing::run_ranks(4, [] {
    Net net;
    const auto mesh = init_device_mesh("cpu", {{"pipeline", 1}, {"dp_outer", 2}, {"dp_shard", 2}});
    EXPECT_TRUE(has(message_of([&] { fully_shard(net, {.mesh = mesh}); }), "needs a mesh with one dimension"));
    EXPECT_EQ(message_of([&] { fully_shard(net, {.mesh = mesh.sub({"dp_outer", "dp_shard"})}); }), "no error");
  });
}

TEST(FullyShard, RanksThatDifferAreAnErrorOnAll) {
  testing::run_ranks(2, [](int rank) {
    const auto mesh = line();
    torch::nn::Linear model(6, rank == 0 ? 4 : 5);
    const auto message = message_of([&] { fully_shard(*model, {.mesh = mesh}); });
    EXPECT_TRUE(has(message, "'weight' [4, 6]") && has(message, "'weight' [5, 6]")) << message;
    const auto net = make_net();
    const auto options = message_of([&] { fully_shard(*net, {.mesh = mesh, .prefetch_depth = 1 + rank}); });
    EXPECT_TRUE(has(options, "prefetch_depth 1") && has(options, "prefetch_depth 2")) << options;
    EXPECT_EQ(message_of([&] { fully_shard(*net, {.mesh = mesh}); }), "no error");
  });
}

// What would take a parameter's data away is refused before it does, so that nothing of the model has two values.
TEST(FullyShard, OtherMemoryIsRefused) {
  over_ranks([](int rank) {
    const auto mesh = line();
    const auto initial = values_of(*make_net());
    const std::vector<std::pair<std::string, std::function<void(const std::shared_ptr<Net>&)>>> ways = {
        {"to(dtype)", [](const auto& model) { model->to(at::kDouble); }},
        {"set_data",
         [](const auto& model) {
           model->first->weight.set_data(at::zeros({10, 6}));
         }},
        {"set_",
         [](const auto& model) {
           const torch::NoGradGuard no_grad;
           model->first->weight.set_(at::zeros({10, 6}));
         }},
        {"vector_to_parameters",
         [](const auto& model) { torch::nn::utils::vector_to_parameters(at::zeros({60 + 10 + 100 + 10 + 30 + 3}), model->parameters()); }},
        {"torch::load", [](const auto& model) {
           std::stringstream file;
           torch::save(std::make_shared<Net>(), file);
           auto target = model;
           torch::load(target, file);
         }}};
    for (const auto& strategy : all_strategies()) {
      for (const auto& [name, give_memory] : ways) {
        SCOPED_TRACE(name + " " + strategy);
        const auto model = make_net();
        auto sharded = fully_shard(*model, {.mesh = mesh, .units = each_linear(), .placements = Placements::from_name(strategy)});
        const auto message = message_of([&, &give_memory = give_memory] { give_memory(model); });
        EXPECT_TRUE(has(message, "parameter 'first.weight' of unit 'first' is sharded and can't be given other memory")) << message;
        EXPECT_TRUE(has(message, "fsdp::fully_unshard") && has(message, "SummonFullParams")) << message;
        expect_same_bits(sharded.full_parameters(), initial);
        fsdp::SGD optimizer(*model, {.lr = 0.1});
        model->forward(batch(rank)).square().mean().backward();
        optimizer.step();
        fully_unshard(*model);
      }
    }
    {
      // A view, and an alias, are others' tensors.
      const auto model = make_net();
      (void)fully_shard(*model, {.mesh = mesh, .units = each_linear()});
      auto alias = model->first->weight.detach();
      alias.set_data(at::zeros({2}));
      EXPECT_TRUE(torch::equal(model->first->weight.clone(), initial[0].second));
    }
    {
      // To what it is already is nothing.
      const auto model = make_net();
      auto sharded = fully_shard(*model, {.mesh = mesh, .units = each_linear()});
      model->to(at::kFloat);
      model->to(at::kCPU);
      model->train();
      model->forward(batch(rank)).square().mean().backward();
      EXPECT_TRUE(sharded.full_gradients()[0].second.defined());
    }
  });
}

TEST(FullyShard, UnshardTrainAndShardAgain) {
  over_ranks([](int rank) {
    const auto mesh = line();
    for (const auto& strategy : testing::all_strategies()) {
      const auto placements = Placements::from_name(strategy);
      const auto plain = make_net();
      const auto model = make_net();
      const auto step = [](Net& net, int r, double scale) {
        net.forward(batch(r)).square().mean().backward();
        const torch::NoGradGuard no_grad;
        for (auto& parameter : net.parameters()) {
          parameter.sub_(scale * parameter.grad());
          parameter.mutable_grad() = at::Tensor();
        }
      };
      std::weak_ptr<engine::Engine> engine;
      for (int round = 0; round < 2; ++round) {
        auto sharded = std::optional(fully_shard(*model, {.mesh = mesh, .units = each_linear(), .placements = placements}));
        engine = sharded->engine();
        {
          std::optional<SGD> optimizer(std::in_place, *model, SGDOptions{.lr = 0.1});
          model->forward(batch(rank)).square().mean().backward();
          optimizer->step();
        }
        for (int r = 0; r < mesh.size(); ++r) plain->forward(batch(r)).square().mean().div(mesh.size()).backward();
        {
          const torch::NoGradGuard no_grad;
          for (auto& parameter : plain->parameters()) parameter.sub_(0.1 * parameter.grad());
          plain->zero_grad();
          model->third->bias.add_(1);  // Still in the gathered copy when the model is un-sharded.
          plain->third->bias.add_(1);
        }
        sharded.reset();
        fully_unshard(*model);
        EXPECT_TRUE(engine.expired()) << strategy;
        EXPECT_TRUE(has(message_of([&] { handle(*model); }), "call fsdp::fully_shard")) << strategy;
        for (const auto& parameter : model->parameters()) {
          EXPECT_FALSE(parameter.key_set().has(kTrapKey));
          EXPECT_TRUE(parameter.requires_grad() && parameter.is_leaf());
          EXPECT_NO_THROW(parameter.data_ptr());
        }
        expect_same(values_of(*model), values_of(*plain), 1e-6, strategy);
        // Ordinary training: gradients are the parameters' own again.
        step(*model, 7, 0.1);
        step(*plain, 7, 0.1);
        expect_same(values_of(*model), values_of(*plain), 1e-5, strategy);
      }
    }
  });
}

TEST(FullyShard, UnshardingGivesParametersTheirOwnDtype) {
  over_ranks([] {
    const auto model = make_net();
    model->to(at::kBFloat16);
    const auto before = values_of(*model);
    fully_shard(*model, {.mesh = line(), .units = each_linear(), .mixed_precision = MixedPrecisionPolicy{.main_params_dtype = at::kFloat}});
    fully_unshard(*model);
    for (const auto& parameter : model->parameters()) EXPECT_EQ(parameter.scalar_type(), at::kBFloat16);
    expect_same_bits(values_of(*model), before);
  });
}

TEST(FullyShard, HandlesAndOptimizersEndWithUnsharding) {
  over_ranks([](int rank) {
    const auto model = make_net();
    const auto sharded = fully_shard(*model, {.mesh = line(), .units = each_linear()});
    SGD optimizer(*model, {.lr = 0.1});
    fully_unshard(*model);
    model->forward(batch(rank)).square().mean().backward();
    EXPECT_TRUE(has(message_of([&] { optimizer.step(); }), "fully_unshard made ordinary again"));
    EXPECT_TRUE(has(message_of([&] { sharded.parameter_shards(); }), "fully_unshard made ordinary again"));
    EXPECT_TRUE(has(message_of([&] { sharded.full_parameters(); }), "fully_unshard made ordinary again"));
  });
}

TEST(FullyShard, AGraphOutlivesItsModel) {
  over_ranks([](int rank) {
    auto model = make_net();
    model->second->bias.set_requires_grad(false);
    std::weak_ptr<engine::Engine> engine = fully_shard(*model, {.mesh = line(), .units = each_linear()}).engine();
    const auto x = batch(rank).requires_grad_();
    auto loss = model->forward(x).square().mean();
    model.reset();
    EXPECT_FALSE(engine.expired());  // The graph holds parameters, and they the engine.
    loss.backward();
    const auto plain = make_net();
    const auto y = batch(rank).requires_grad_();
    plain->forward(y).square().mean().backward();
    EXPECT_TRUE(torch::equal(x.grad(), y.grad()));
    loss = at::Tensor();
    EXPECT_TRUE(engine.expired());
  });
}

TEST(FullyShard, NothingHoldsTheEngineButTheModelAndItsUsers) {
  over_ranks([](int rank) {
    for (const auto& strategy : testing::all_strategies()) {
      auto model = make_net();
      std::weak_ptr<engine::Engine> engine;
      {
        const auto sharded = fully_shard(*model, {.mesh = line(), .units = each_linear(), .placements = Placements::from_name(strategy)});
        engine = sharded.engine();
      }
      EXPECT_FALSE(engine.expired());
      {
        AdamW optimizer(*model);
        for (int step = 0; step < 2; ++step) {
          model->forward(batch(rank)).square().mean().backward();
          clip_grad_norm(*model, 1);
          optimizer.step();
          optimizer.zero_grad();
        }
        // A backward that dies, and a forward without one.
        auto hidden = model->first(batch(rank));
        hidden.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("out of luck"); });
        auto loss = model->second(hidden).sum();
        EXPECT_NE(message_of<std::exception>([&] { loss.backward(); }), "no error");
        model->forward(batch(rank));
        model.reset();
        EXPECT_FALSE(engine.expired());  // The optimizer holds it.
      }
      EXPECT_TRUE(engine.expired()) << strategy;
    }
  });
}

TEST(FullyShard, AParameterOutlivesItsModel) {
  over_ranks([] {
    const auto plain = make_net();
    auto model = make_net();
    (void)fully_shard(*model, {.mesh = line(), .units = each_linear()});
    const auto weight = model->second->weight;
    model.reset();
    EXPECT_TRUE(torch::equal(weight, plain->second->weight));  // It holds the engine; the other parameters are gone.
  });
  over_ranks([] {
    auto model = make_net();
    at::Tensor detached;
    {
      const auto sharded = fully_shard(*model, {.mesh = line(), .units = each_linear()});
      detached = model->second->weight.detach();
    }
    model.reset();
    EXPECT_TRUE(has(message_of([&] { detached.sum(); }), "after the model is gone"));
    EXPECT_THROW(detached.data_ptr(), c10::Error);
  });
}

TEST(FullyShard, ZeroGradOfTheModuleLeavesShards) {
  over_ranks([](int rank) {
    const auto model = make_net();
    auto sharded = fully_shard(*model, {.mesh = line(), .units = each_linear()});
    model->forward(batch(rank)).square().mean().backward();
    const auto before = sharded.full_gradients();
    model->zero_grad();
    expect_same(sharded.full_gradients(), before, 0, "after the module's zero_grad()");
  });
}

TEST(FullyShard, GranularityKeepsPiecesWhole) {
  over_ranks([](int rank) {
    const auto mesh = line();
    const auto plain = make_net();
    const auto model = make_net();
    auto sharded =
        fully_shard(*model, {.mesh = mesh, .units = each_linear(), .granularity = [](const std::string& name, const at::Tensor& parameter) {
                               if (parameter.dim() == 1) return Granularity::whole();
                               return name == "second.weight" ? Granularity::blocks(20) : Granularity::rows();
                             }});
    for (const auto& shard : sharded.parameter_shards()) {
      const std::int64_t unit = shard.shape.size() == 1 ? shard.shape[0] : shard.name == "second.weight" ? 20 : shard.shape[1];
      EXPECT_EQ(shard.offset % unit, 0) << shard.name;
      EXPECT_EQ(shard.value.numel() % unit, 0) << shard.name;
    }
    for (int r = 0; r < mesh.size(); ++r) plain->forward(batch(r)).square().mean().backward();
    model->forward(batch(rank)).square().mean().backward();
    auto expected = testing::gradients_of(*plain);
    for (auto& [name, gradient] : expected) gradient = gradient / mesh.size();
    expect_same(sharded.full_gradients(), expected, 1e-5, "gradients");
    expect_same(sharded.full_parameters(), values_of(*plain), 0, "parameters");
  });
}

}  // namespace fully_shard_test
}  // namespace fsdp
