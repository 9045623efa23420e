// First values from rank 0, or from nowhere.

#include "shard/initial_values.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <string>

#include "comm/communicator.h"
#include "fsdp/fsdp.h"
#include "support/deferred_twins.h"
#include "support/shardings.h"
#include "support/twins.h"

namespace fsdp {
namespace initial_values_test {

using testing::batch;
using testing::buffers_of;
using testing::each_linear;
using testing::expect_same;
using testing::has;
using testing::line;
using testing::make_net;
using testing::message_of;
using testing::Net;
using testing::over_ranks;
using testing::run_ranks;
using testing::values_of;

TEST(DeferredInit, NotDrawn) {
  run_ranks(2, [](int rank) {
    torch::manual_seed(5);
    const auto state = at::detail::getDefaultCPUGenerator().get_state();
    const auto model = deferred_init([] { return std::make_shared<Net>(); }, {.draw = false});
    EXPECT_TRUE(torch::equal(at::detail::getDefaultCPUGenerator().get_state(), state));
    const auto message = message_of([&] { model->first->weight.sum().item<float>(); });
    EXPECT_TRUE(has(message, "'aten::uniform_'") && has(message, "InitialValues::kZero")) << message;
    const auto sharded = fully_shard(*model, {.mesh = line(), .initial_values = InitialValues::kZero});
    for (const auto& shard : sharded.parameter_shards()) EXPECT_EQ(shard.value.count_nonzero().item<std::int64_t>(), 0);
  });
}

// Values from elsewhere.

struct Normed : torch::nn::Module {
  explicit Normed(std::uint64_t seed)
      : linear(register_module("linear", torch::nn::Linear(6, 7))), norm(register_module("norm", torch::nn::BatchNorm1d(7))) {
    norm->running_mean.copy_(testing::normal({7}, seed));
    norm->num_batches_tracked.add_(static_cast<std::int64_t>(seed));
    register_parameter("half", testing::normal({5}, seed).to(at::kHalf), /*requires_grad=*/false);
    register_parameter("none", at::empty({0}));
  }
  at::Tensor forward(const at::Tensor& x) { return norm(linear(x)); }
  torch::nn::Linear linear;
  torch::nn::BatchNorm1d norm;
};

TEST(InitialValues, FromRank0) {
  for (const int ranks : {1, 2, 4}) {
    run_ranks(ranks, [](int rank) {
      const auto mesh = line();
      // Whole, deferred, and deferred without a value on any other rank.
      for (const int kind : {0, 1, 2, 3}) {
        for (const auto& strategy : testing::all_strategies()) {
          torch::manual_seed(0);
          const Normed expected(0);
          torch::manual_seed(rank);
          const auto make = [&] { return std::make_shared<Normed>(static_cast<std::uint64_t>(rank)); };
          const bool deferred = kind == 1 || (kind == 2 && rank == 0) || (kind == 3 && rank > 0);
          const auto model = deferred ? deferred_init(make, {.draw = kind != 3}) : make();
          mesh.communicator("dp_shard")->reset_stats();
          auto sharded = fully_shard(*model, {.mesh = mesh,
                                              .units = each_linear(),
                                              .placements = Placements::from_name(strategy),
                                              .initial_values = InitialValues::kFromRank0});
          const std::string what = strategy + ", kind " + std::to_string(kind);
          expect_same(sharded.full_parameters(), values_of(expected), 0, what);
          expect_same(buffers_of(*model), buffers_of(expected), 0, what + ", buffers");
          EXPECT_EQ(sharded.wire_stats().scatters, 3);  // two units, the buffers
          if (strategy != "no_shard") {
            // Each peer its shards, no more; and the buffers: two vectors and a counter.
            std::int64_t shards = 0;
            for (const auto& shard : sharded.parameter_shards()) shards += static_cast<std::int64_t>(shard.value.nbytes());
            const double others = mesh.sum(rank == 0 ? 0 : static_cast<double>(shards));
            const auto buffers = static_cast<double>((mesh.size() - 1) * (7 * 4 + 7 * 4 + 8));
            EXPECT_EQ(static_cast<double>(sharded.wire_stats().scatter_bytes), rank == 0 ? others + buffers : 0) << what;
          }
          model->forward(batch(rank)).square().mean().backward();
        }
      }
    });
  }
}

TEST(InitialValues, BuffersThatDifferAreAnError) {
  run_ranks(2, [](int rank) {
    torch::nn::Linear model(3, 3);
    model->register_buffer("table", at::zeros({2 + rank}));
    const auto message = message_of([&] { fully_shard(*model, {.mesh = line(), .initial_values = InitialValues::kFromRank0}); });
    EXPECT_TRUE(has(message, "buffer 'table' [2]") && has(message, "buffer 'table' [3]")) << message;
  });
}

TEST(InitialValues, IgnoredParametersThatDifferAreAnError) {
  run_ranks(2, [](int rank) {
    torch::nn::Linear model(3, 3);
    model->register_parameter("adapter", at::zeros({2 + rank}));
    const auto ignored = [](const std::string& name, const at::Tensor&) { return name == "adapter"; };
    const auto message =
        message_of([&] { fully_shard(*model, {.mesh = line(), .ignore = ignored, .initial_values = InitialValues::kFromRank0}); });
    EXPECT_TRUE(has(message, "ignored parameter 'adapter' [2]") && has(message, "ignored parameter 'adapter' [3]")) << message;
    fully_shard(*model, {.mesh = line(), .ignore = ignored});  // Its own values may have any shape.
  });
}

TEST(InitialValues, OfIgnoredSparseParametersAreTheirOwn) {
  run_ranks(2, [](int) {
    torch::nn::Linear model(3, 3);
    const auto sparse = at::eye(4).to_sparse();
    model->register_parameter("sparse", sparse.clone(), /*requires_grad=*/false);
    const auto ignored = [](const std::string& name, const at::Tensor&) { return name == "sparse"; };
    const auto message =
        message_of([&] { fully_shard(*model, {.mesh = line(), .ignore = ignored, .initial_values = InitialValues::kFromRank0}); });
    EXPECT_TRUE(has(message, "ignored parameter 'sparse' is not dense")) << message;
    fully_shard(*model, {.mesh = line(), .ignore = ignored});
    EXPECT_TRUE(at::equal(model->named_parameters()["sparse"].to_dense(), at::eye(4)));
    model->forward(at::ones({2, 3})).sum().backward();
  });
}

TEST(InitialValues, FromRank0AreConjugatedAndNegated) {
  run_ranks(2, [](int rank) {
    torch::manual_seed(rank);
    torch::nn::Module model;
    const auto values = torch::randn({64}, at::kComplexFloat);
    model.register_parameter("conjugated", values.conj(), /*requires_grad=*/false);
    model.register_parameter("negated", at::imag(values.clone().conj()), /*requires_grad=*/false);
    ASSERT_TRUE(model.parameters()[0].is_conj() && model.parameters()[1].is_neg());
    torch::manual_seed(0);
    const auto of_rank0 = torch::randn({64}, at::kComplexFloat);
    auto sharded = fully_shard(model, {.mesh = line(), .initial_values = InitialValues::kFromRank0});
    const auto found = sharded.full_parameters();
    EXPECT_TRUE(at::equal(found[0].second, of_rank0.conj().resolve_conj()));
    EXPECT_TRUE(at::equal(found[1].second, -at::imag(of_rank0)));
  });
}

// What rank 0 of each unit's mesh has, wherever the unit's main parameters are and whatever it is gathered in.
TEST(InitialValues, FromRank0InEverySharding) {
  over_ranks([](int rank) {
    const auto net_of = [](int seed) {
      torch::manual_seed(seed);
      const auto net = std::make_shared<Net>();
      net->second->bias.set_requires_grad(false);
      return net;
    };
    for (auto& [name, options, compute] : testing::shardings(each_linear(), "second")) {
      for (const bool deferred : {false, true}) {
        const auto model = deferred ? deferred_init([&] { return net_of(rank); }) : net_of(rank);
        const auto expected = net_of(0);
        if (name.starts_with("a mesh of its own")) {
          const torch::NoGradGuard no_grad;
          const auto row = static_cast<int>(rank - options.mesh.coordinate("dp_shard"));
          expected->second->weight.copy_(net_of(row)->second->weight);
          expected->second->bias.copy_(net_of(row)->second->bias);
        }
        options.initial_values = InitialValues::kFromRank0;
        const auto sharded = fully_shard(*model, options);
        expect_same(sharded.full_parameters(), values_of(*expected), 0, name);
        if (!name.starts_with("a mesh of its own")) {
          const auto twin = net_of(0);
          options.initial_values = InitialValues::kOwn;
          (void)fully_shard(*twin, options);
          const auto x = batch(rank).to(compute);
          EXPECT_TRUE(torch::equal(model->forward(x), twin->forward(x))) << name;
        }
      }
    }
  });
}

TEST(InitialValues, ARankThatCanNotComputeItsValuesFailsAll) {
  for (const auto from : {InitialValues::kOwn, InitialValues::kFromRank0}) {
    run_ranks(2, [&](int rank) {
      // On rank 0, nothing was drawn.
      const auto model = deferred_init([] { return std::make_shared<Net>(); }, {.draw = rank != 0});
      const auto message = message_of([&] { fully_shard(*model, {.mesh = line(), .units = each_linear(), .initial_values = from}); });
      EXPECT_TRUE(has(message, "rank 0 has") && has(message, "'aten::uniform_' was recorded without drawing")) << message;
    });
  }
}

// Views of one storage stay so, and a buffer of a unit comes from the first rank of its mesh.
TEST(InitialValues, Buffers) {
  struct Model : torch::nn::Module {
    explicit Model(int rank) {
      const auto whole = register_buffer("whole", at::arange(6).add_(rank));
      register_buffer("half", whole.narrow(0, 3, 3));
      register_buffer("transposed", at::arange(6).view({2, 3}).add(rank).t());
      register_module("expert", torch::nn::BatchNorm1d(2))->running_mean.fill_(rank);
    }
  };
  run_ranks(4, [](int rank) {
    const auto mesh = init_device_mesh("cpu", {{"dp_outer", 2}, {"dp_shard", 2}});
    for (const bool deferred : {false, true}) {
      const auto make = [&] { return std::make_shared<Model>(rank); };
      const auto model = deferred ? deferred_init(make) : make();
      fully_shard(*model, {.mesh = mesh,
                           .units = each<torch::nn::BatchNorm1dImpl>(),
                           .initial_values = InitialValues::kFromRank0,
                           .unit_settings = [&](const std::string& name, const torch::nn::Module&) {
                             return UnitSettings{.mesh = name == "expert" ? mesh["dp_shard"] : DeviceMesh()};
                           }});
      auto buffers = model->named_buffers();
      EXPECT_TRUE(torch::equal(buffers["half"], at::arange(3, 6)));
      EXPECT_TRUE(torch::equal(buffers["transposed"], at::arange(6).view({2, 3}).t()));
      EXPECT_TRUE(torch::equal(buffers["expert.running_mean"], at::full({2}, rank / 2 * 2.0F)));
      buffers["whole"].add_(1);
      EXPECT_TRUE(torch::equal(buffers["half"], at::arange(4, 7)));
    }
  });
}

TEST(InitialValues, ZeroAndThenLoaded) {
  over_ranks([](int rank) {
    for (auto& [name, options, compute] : testing::shardings(each_linear(), "second")) {
      const auto plain = make_net();
      const auto model = deferred_init([] { return std::make_shared<Net>(); }, {.draw = false});
      options.initial_values = InitialValues::kZero;
      auto sharded = fully_shard(*model, options);
      for (const auto& [parameter, value] : sharded.full_parameters()) {
        EXPECT_EQ(value.count_nonzero().item<std::int64_t>(), 0) << name << " " << parameter;
      }
      model->forward(batch(rank).to(compute));  // zeros are gathered, and are out of date afterwards
      for (const auto& shard : sharded.parameter_shards()) {
        const auto whole = plain->named_parameters()[shard.name].detach();
        shard.value.copy_(whole.view(-1).narrow(0, shard.offset, shard.value.numel()));
      }
      sharded.main_parameters_changed();
      expect_same(sharded.full_parameters(), values_of(*plain), 0, name);
      const auto twin = make_net();
      options.initial_values = InitialValues::kOwn;
      (void)fully_shard(*twin, options);
      const auto x = batch(rank).to(compute);
      EXPECT_TRUE(torch::equal(model->forward(x), twin->forward(x))) << name;
    }
  });
}

}  // namespace initial_values_test
}  // namespace fsdp
