// Ranks that pass other options, or hold another model: one Error on each of them, which names the unit (or parameter) and both values.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "fsdp/fsdp.h"
#include "support/twins.h"

namespace fsdp {
namespace agreement_test {

using testing::each_linear;
using testing::has;
using testing::line;
using testing::make_net;
using testing::message_of;
using testing::plane;

/// The message of a fully_shard, in which each part must occur. Then the same model can be sharded alike.
void expect_difference(const FullyShardOptions& options, const std::vector<std::string>& parts) {
  const auto model = make_net();
  const auto message = message_of([&] { fully_shard(*model, options); });
  EXPECT_TRUE(has(message, "differ. Every rank must build the same model and pass the same options")) << message;
  for (const auto& part : parts) EXPECT_TRUE(has(message, part)) << part << " in\n" << message;
  EXPECT_EQ(message_of([&] { fully_shard(*model, {.mesh = options.mesh}); }), "no error");
}

/// Settings of the unit 'second' alone.
FullyShardOptions with(const DeviceMesh& mesh, UnitSettings settings) {
  return {.mesh = mesh, .units = each_linear(), .unit_settings = [settings = std::move(settings)](const std::string& name, const auto&) {
            return name == "second" ? settings : UnitSettings{};
          }};
}

TEST(Agreement, OnAUnitsGradientDivideFactor) {
  testing::run_ranks(2, [](int rank) {
    expect_difference(with(line(), {.gradient_divide_factor = rank == 0 ? 0.0 : 1.0 / 3}),
                      {"rank 0 has 'unit 'second': ", "gradient_divide_factor 0,", "gradient_divide_factor 0.3333333333333333"});
    // Also where the difference is too small to be seen in six digits.
    expect_difference(with(line(), {.gradient_divide_factor = rank == 0 ? 1 : 1 + 1e-9}),
                      {"'unit 'second': ", "gradient_divide_factor 1,", "gradient_divide_factor 1.00000000"});
  });
}

TEST(Agreement, OnAUnitsReshardAfterForward) {
  testing::run_ranks(2, [](int rank) {
    expect_difference(with(line(), {.reshard_after_forward = rank == 0}),
                      {"rank 0 has 'unit 'second': ", "reshard_after_forward 1", "reshard_after_forward 0"});
    // What it comes to counts, not how it is said.
    const auto model = make_net();
    auto options = with(line(), rank == 0 ? UnitSettings{.reshard_after_forward = true} : UnitSettings{});
    EXPECT_EQ(message_of([&] { fully_shard(*model, options); }), "no error");
  });
}

TEST(Agreement, OnAUnitsPrecision) {
  testing::run_ranks(2, [](int rank) {
    const auto differ = [&](const MixedPrecisionPolicy& on_rank_1, const std::vector<std::string>& parts) {
      const MixedPrecisionPolicy on_rank_0{};
      expect_difference(with(line(), {.mixed_precision = rank == 0 ? on_rank_0 : on_rank_1}), parts);
    };
    differ({.param_dtype = at::kBFloat16}, {"unit 'second': parameter 'second.weight'", "dtypes BFloat16 Float Float Float"});
    differ({.main_params_dtype = at::kDouble}, {"unit 'second': parameter 'second.weight'", "dtypes Float Double Double Double"});
    differ({.main_grads_dtype = at::kDouble}, {"unit 'second': parameter 'second.weight'", "dtypes Float Float Double Double"});
    differ({.grad_comm_dtype = at::kBFloat16}, {"unit 'second': parameter 'second.weight'", "dtypes Float Float Float BFloat16"});
    differ({.output_dtype = at::kHalf}, {"rank 0 has 'unit 'second': ", "output_dtype as it is", "output_dtype Half"});
    differ({.cast_forward_inputs = false}, {"rank 0 has 'unit 'second': ", "cast_forward_inputs 1", "cast_forward_inputs 0"});
  });
}

TEST(Agreement, OnAUnitsMesh) {
  testing::run_ranks(4, [](int rank) {
    const auto grid = plane();
    expect_difference(with(grid, {.mesh = rank == 3 ? grid["dp_outer"] : grid["dp_shard"]}),
                      {"unit 'second': mesh dp_shard=2", "unit 'second': mesh dp_outer=2"});
    expect_difference(with(grid, {.mesh = rank == 2 ? grid["dp_shard"] : DeviceMesh{}}),
                      {"unit 'second': mesh dp_shard=2", "unit 'second': mesh dp_outer=2 dp_shard=2"});
  });
}

TEST(Agreement, OnSettingsThatOneRankAloneRefuses) {
  testing::run_ranks(2, [](int rank) {
    expect_difference(with(line(), {.gradient_divide_factor = rank == 0 ? 1.0 : -1.0}), {"unit 'second': gradient_divide_factor -1.0"});
  });
  testing::run_ranks(1, [] {
    for (const double factor : {-1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
      const auto model = make_net();
      const auto message = message_of([&] { fully_shard(*model, with(line(), {.gradient_divide_factor = factor})); });
      EXPECT_TRUE(has(message, "unit 'second': gradient_divide_factor") && has(message, "give a positive number")) << message;
    }
  });
}

TEST(Agreement, OnGranularityAndGatherFormat) {
  testing::run_ranks(2, [](int rank) {
    expect_difference({.mesh = line(),
                       .units = each_linear(),
                       .granularity =
                           [&](const std::string& name, const at::Tensor&) {
                             return name == "third.weight" && rank == 1 ? Granularity::rows() : Granularity::element();
                           }},
                      {"unit 'third': parameter 'third.weight'", "granularity 0/1", "granularity 1/1"});
    expect_difference({.mesh = line(),
                       .units = each_linear(),
                       .granularity = [&](const std::string& name,
                                          const at::Tensor&) { return Granularity::blocks(name == "third.weight" && rank == 1 ? 2 : 5); }},
                      {"unit 'third': parameter 'third.weight'", "granularity 2/5", "granularity 2/2"});
    const auto format = std::make_shared<const GatherFormat>(float8_blocks(rank == 0 ? 32 : 64));
    expect_difference(
        {.mesh = line(),
         .units = each_linear(),
         .gather_format = [&](const std::string& name, const at::Tensor&) { return name == "first.weight" ? format : nullptr; }},
        {"unit 'first': parameter 'first.weight'", "gathered in 33 bytes per 32", "gathered in 65 bytes per 64"});
    const auto differences = std::make_shared<const GatherFormat>(int4_differences({.block = 32, .hadamard = rank == 1}));
    expect_difference({.mesh = line(),
                       .units = each_linear(),
                       .placements = Placements::optim_grads(),
                       .gather_format = [&](const std::string&, const at::Tensor&) { return differences; }},
                      {"unit 'first': parameter 'first.weight'", "18 bytes per 32 (int4 differences)", "(int4 differences, transformed)"});
    expect_difference({.mesh = line(),
                       .units = each_linear(),
                       .gather_format = [&](const std::string& name,
                                            const at::Tensor&) { return name == "first.weight" && rank == 0 ? format : nullptr; }},
                      {"unit 'first': parameter 'first.weight'", "gathered in 33 bytes per 32"});
  });
}

TEST(Agreement, OnIgnoredParametersAndUnitGroups) {
  testing::run_ranks(2, [](int rank) {
    expect_difference({.mesh = line(),
                       .units = each_linear(),
                       .ignore = [&](const std::string& name, const at::Tensor&) { return name == "second.bias" && rank == 1; }},
                      {"rank 0 has 'unit 'second': parameter 'second.bias'"});
    expect_difference({.mesh = line(),
                       .unit_groups = rank == 0 ? std::vector<std::vector<std::string>>{{"first", "second"}}
                                                : std::vector<std::vector<std::string>>{{"first", "third"}}},
                      {"unit 'first+second'", "unit 'first+third'"});
    expect_difference({.mesh = line(), .units = [&](const std::string& name, const auto&) { return name == "second" && rank == 0; }},
                      {"rank 0 has 'unit 'second'"});
  });
}

TEST(Agreement, OnTensorParallelPieces) {
  testing::run_ranks(4, [](int rank) {
    const auto grid = init_device_mesh("cpu", {{"dp", 2}, {"tp", 2}});
    const auto pieces = [&](const std::string& named, std::int64_t dim) {
      return [mesh = grid["tp"], named, dim](const std::string& name, const at::Tensor&) -> std::optional<TensorParallel> {
        if (name == "first.bias") return TensorParallel{mesh, 0};
        if (name == named) return TensorParallel{mesh, dim};
        return std::nullopt;
      };
    };
    const auto differ = [&](const auto& tensor_parallel, const std::vector<std::string>& parts) {
      const auto model = make_net();
      const auto message =
          message_of([&] { fully_shard(*model, {.mesh = grid["dp"], .units = each_linear(), .tensor_parallel = tensor_parallel}); });
      for (const auto& part : parts) EXPECT_TRUE(has(message, part)) << part << " in\n" << message;
    };
    const bool other_replica = rank >= 2;
    differ(pieces("second.weight", other_replica ? 1 : 0),
           {"unit 'second': parameter 'second.weight'", "along dimension 0 over tp=2", "along dimension 1 over tp=2"});
    differ(pieces(other_replica ? "none" : "second.weight", 0),
           {"unit 'second': parameter 'second.weight'", "along dimension 0 over tp=2"});
    // Ranks of one whole: each row of the mesh of replicas agrees in itself.
    const bool other_piece = rank % 2 == 1;
    differ(pieces("second.weight", other_piece ? 1 : 0), {"parameter 'second.weight' [cut, 10]", "parameter 'second.weight' [10, cut]"});
    differ(pieces(other_piece ? "none" : "second.weight", 0),
           {"parameter 'second.weight' [cut, 10]", "parameter 'second.weight' [10, 10]"});
    // What one rank alone refuses, all four hear of.
    const auto model = make_net();
    const auto refuses = [&](bool wrong) {
      FullyShardOptions options{.mesh = grid["dp"], .units = each_linear()};
      options.tensor_parallel = pieces("second.weight", 0);
      options.unit_settings = [wrong](const std::string&, const torch::nn::Module&) {
        return UnitSettings{.gradient_divide_factor = wrong ? -1.0 : 0.0};
      };
      return message_of([&] { fully_shard(*model, options); });
    };
    EXPECT_TRUE(has(refuses(rank == 3), "gradient_divide_factor -1"));
    EXPECT_EQ(refuses(false), "no error");
  });
}

/// Of the first unit of a model of two weights.
std::uint64_t layout_of(std::initializer_list<const char*> names, bool freezes_first, std::optional<at::ScalarType> main) {
  torch::nn::Module module;
  for (const char* name : names) module.register_parameter(name, torch::ones({4, 4}));
  module.parameters().front().requires_grad_(!freezes_first);
  FullyShardOptions options{.mesh = line()};
  if (main) options.mixed_precision = MixedPrecisionPolicy{.main_params_dtype = main};
  return fully_shard(module, options).engine()->units().front()->label("all-gather").facts.layout;
}

TEST(Agreement, LayoutsHaveHashes) {
  testing::run_ranks(1, [] {
    const auto plain = layout_of({"a", "b"}, false, {});
    EXPECT_NE(plain, 0);
    EXPECT_EQ(plain, layout_of({"a", "b"}, false, {}));
    EXPECT_NE(plain, layout_of({"b", "a"}, false, {}));
    EXPECT_NE(plain, layout_of({"a", "c"}, false, {}));
    EXPECT_NE(plain, layout_of({"a", "b"}, true, {}));
    EXPECT_NE(plain, layout_of({"a", "b"}, false, at::kDouble));
  });
}

TEST(Agreement, OnTheCheckOfInitialValues) {
  testing::run_ranks(2, [](int rank) {
    expect_difference({.mesh = line(), .check_initial_values = rank == 0}, {"check_initial_values 1", "check_initial_values 0"});
  });
}

}  // namespace agreement_test
}  // namespace fsdp
