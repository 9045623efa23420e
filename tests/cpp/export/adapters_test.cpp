// Products of thin matrices, added to weights on the way: for parts of any form that a rank may have of a weight.

#include "export/adapters.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "export/weight_stream.h"
#include "fsdp/fsdp.h"
#include "support/multi_rank.h"
#include "support/same_bits.h"

namespace adapters_test {

using fsdp::testing::run_ranks;
using fsdp::testing::same_bits;
using fsdp::weights::Entry;

/// Weights with odd sizes, so that pieces begin and end within rows; each with the two factors of an adapter. Values have few bits:
/// products are exact in whatever order they are added up.
struct ModelImpl : torch::nn::Module {
  ModelImpl() {
    const auto draw = [](at::IntArrayRef shape) { return torch::randint(-16, 17, shape).to(at::kFloat) / 16; };
    for (const auto& [name, rows, columns] : std::vector<std::tuple<std::string, int, int>>{{"a", 7, 5}, {"b", 1, 9}, {"c", 12, 3}}) {
      register_parameter(name, torch::randn({rows, columns}));
      register_parameter(name + "_up", draw({name == "c" ? columns : rows, 2}));  // c is the transpose of the product
      register_parameter(name + "_down", draw({2, name == "c" ? rows : columns}));
    }
  }
};
TORCH_MODULE(Model);

/// W + 0.5 up down, of the whole tensors.
at::Tensor merged(const std::map<std::string, at::Tensor>& all, const std::string& name) {
  const auto product = all.at(name + "_up").matmul(all.at(name + "_down")) * 0.5;
  return all.at(name) + (name == "c" ? product.t() : product);
}

/// All weights with their adapters, by a stream with small buckets.
std::map<std::string, at::Tensor> export_all(torch::nn::Module& model, std::optional<at::ScalarType> dtype, std::int64_t bucket_bytes,
                                             fsdp::WeightReceivers ranks = fsdp::WeightReceivers::kAll) {
  fsdp::weights::Request request{.engines = {fsdp::handle(model).engine()}, .meshes = {}, .entries = {}, .options = {}, .problem = {}};
  request.options = {.bucket_bytes = bucket_bytes, .dtype = dtype, .ranks = ranks};
  std::map<std::string, Entry> entries;
  for (const auto& unit : request.engines.front()->units()) {
    for (std::size_t i = 0; i < unit->parameters.size(); ++i) {
      const auto slice = unit->main_slice(i);
      const auto& parameter = unit->parameters[i];
      entries[parameter.name] = {.names = {parameter.name},
                                 .shape = parameter.shape,
                                 .own = unit->main.parts[slice.sub_buffer].narrow(0, slice.offset, slice.numel),
                                 .unit = unit.get(),
                                 .parameter = i};
    }
  }
  for (const std::string name : {"a", "b", "c"}) {
    const auto first = request.factors.size();
    request.factors.push_back(entries.at(name + "_up"));
    request.factors.push_back(entries.at(name + "_down"));
    entries.at(name).added.push_back({.up = first, .down = first + 1, .scale = 0.5, .transposed = name == "c"});
    request.entries.push_back(entries.at(name));
  }
  fsdp::weights::WeightStream stream(std::move(request));
  std::map<std::string, at::Tensor> found;
  while (const auto bucket = stream.next()) {
    for (const auto& [name, weight] : bucket->weights) found[name] = weight.clone();
  }
  return found;
}

TEST(Adapters, AreAddedToPartsOfAnyForm) {
  run_ranks(
      4,
      [](int rank) {
        const auto line = fsdp::init_device_mesh("cpu", {{"shard", -1}});
        const auto plane = fsdp::init_device_mesh("cpu", {{"outer", 2}, {"shard", 2}});
        const fsdp::FullyShardOptions by_elements{.mesh = line};
        auto by_rows = by_elements;
        by_rows.granularity = [](const std::string&, const at::Tensor&) { return fsdp::Granularity::rows(); };
        const std::vector<std::pair<std::string, fsdp::FullyShardOptions>> shardings = {
            {"elements", by_elements},
            {"rows", by_rows},
            {"HSDP", {.mesh = plane}},
            {"HFSDP", {.mesh = plane, .outer_placements = fsdp::Placements::optim()}},
            {"replicated", {.mesh = line, .placements = fsdp::Placements::no_shard()}},
            {"offload", {.mesh = line, .offload = fsdp::Offload::kAll}}};
        for (const auto& [name, options] : shardings) {
          SCOPED_TRACE(name);
          torch::manual_seed(5);
          Model model;
          std::map<std::string, at::Tensor> all;
          for (const auto& parameter : model->named_parameters()) all[parameter.key()] = parameter.value().detach().clone();
          fsdp::fully_shard(*model, options);
          for (const std::int64_t bucket_bytes : {1, 1 << 20}) {
            for (const auto& dtype : {std::optional<at::ScalarType>(), std::optional(at::kBFloat16)}) {
              const auto found = export_all(*model, dtype, bucket_bytes);
              ASSERT_EQ(found.size(), 3U);
              for (const auto& [weight, value] : found) {
                EXPECT_TRUE(same_bits(value, merged(all, weight).to(dtype.value_or(at::kFloat)))) << weight;
              }
            }
          }
          EXPECT_EQ(export_all(*model, {}, 1, fsdp::WeightReceivers::kFirst).size(), rank == 0 ? 3U : 0U);
          for (const auto& [weight, value] : fsdp::handle(*model).full_parameters()) EXPECT_TRUE(same_bits(value, all.at(weight)));
        }
      },
      std::chrono::seconds(200));
}

TEST(Adapters, OfLargeWeightsAreComputedInParts) {
  run_ranks(2, [](int) {
    // More elements of a shard than are computed at once.
    struct Large : torch::nn::Module {
      Large() {
        const auto draw = [](at::IntArrayRef shape) { return torch::randint(-16, 17, shape).to(at::kFloat) / 16; };
        for (const std::string name : {"a", "b", "c"}) {
          register_parameter(name, torch::randn({1501, 701}));
          register_parameter(name + "_up", draw({name == "c" ? 701 : 1501, 2}));
          register_parameter(name + "_down", draw({2, name == "c" ? 1501 : 701}));
        }
      }
    };
    torch::manual_seed(5);
    Large model;
    std::map<std::string, at::Tensor> all;
    for (const auto& parameter : model.named_parameters()) all[parameter.key()] = parameter.value().detach().clone();
    auto sharded = fsdp::fully_shard(model, {.mesh = fsdp::init_device_mesh("cpu", {{"shard", -1}})});
    const auto before = sharded.memory_stats().gathered_parameters;
    for (const auto& [weight, value] : export_all(model, {}, 1)) EXPECT_TRUE(same_bits(value, merged(all, weight))) << weight;
    const auto after = sharded.memory_stats().gathered_parameters;
    EXPECT_EQ(after.live, before.live);
    // Two buckets, the factors, and the sums and products of 2^18 elements.
    const std::int64_t weight = 4 * 1501 * 701, factors = 4 * 2 * (1501 + 701);
    EXPECT_GE(after.peak - before.live, 2 * weight + factors + 8 * ((1 << 18) - 701));
    EXPECT_LE(after.peak - before.live, 2 * weight + factors + 8 * (1 << 18) + 1000);
  });
}

}  // namespace adapters_test
