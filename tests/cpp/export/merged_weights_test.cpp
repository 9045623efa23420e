// Adapters that are merged on the way, by names: the weights of the merged model of a single process.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/fsdp.h"
#include "support/messages.h"
#include "support/multi_rank.h"
#include "support/same_bits.h"

namespace merged_weights_test {

using fsdp::FullWeightsOptions;
using fsdp::WeightAdapter;
using fsdp::testing::has;
using fsdp::testing::message_of;
using fsdp::testing::run_ranks;
using fsdp::testing::same_bits;

using Tensors = std::map<std::string, at::Tensor>;

/// Values of few bits: products are exact, in whatever order they are added up.
at::Tensor draw(at::IntArrayRef shape) { return torch::randint(-16, 17, shape).to(at::kFloat) / 16; }

/// A linear layer with an adapter, as programs write it.
struct LoraLinearImpl : torch::nn::Module {
  LoraLinearImpl(std::int64_t in, std::int64_t out) : base(register_module("base", torch::nn::Linear(in, out))) {
    const torch::NoGradGuard no_grad;
    base->weight.copy_(draw({out, in}));
    base->weight.requires_grad_(false);
    a = register_parameter("lora_a", draw({2, in}));
    b = register_parameter("lora_b", draw({out, 2}));
  }
  at::Tensor forward(const at::Tensor& x) {
    return base->forward(x) + 0.5 * torch::nn::functional::linear(torch::nn::functional::linear(x, a), b);
  }
  torch::nn::Linear base;
  at::Tensor a, b;
};
TORCH_MODULE(LoraLinear);

struct NetImpl : torch::nn::Module {
  NetImpl()
      : first(register_module("first", LoraLinear(5, 7))),
        second(register_module("second", LoraLinear(7, 3))),
        last(register_module("last", torch::nn::Linear(3, 4))) {}
  at::Tensor forward(const at::Tensor& x) { return last->forward(torch::relu(second->forward(torch::relu(first->forward(x))))); }
  LoraLinear first, second;
  torch::nn::Linear last;
};
TORCH_MODULE(Net);

/// The same without adapters.
struct BaseNetImpl : torch::nn::Module {
  BaseNetImpl()
      : first(register_module("first", torch::nn::Linear(5, 7))),
        second(register_module("second", torch::nn::Linear(7, 3))),
        last(register_module("last", torch::nn::Linear(3, 4))) {}
  at::Tensor forward(const at::Tensor& x) { return last->forward(torch::relu(second->forward(torch::relu(first->forward(x))))); }
  torch::nn::Linear first, second, last;
};
TORCH_MODULE(BaseNet);

std::vector<WeightAdapter> adapters_of(const torch::nn::Module& model) {
  std::vector<WeightAdapter> adapters;
  for (const auto& layer : model.named_modules()) {
    if (layer.value()->as<LoraLinearImpl>() == nullptr) continue;
    const auto& path = layer.key();
    adapters.push_back({.weight = path + ".base.weight", .up = path + ".lora_b", .down = path + ".lora_a", .scale = 0.5});
  }
  return adapters;
}

std::string without_base(const std::string& name) {
  const auto at = name.find("base.");
  return at == std::string::npos ? name : name.substr(0, at) + name.substr(at + 5);
}

Tensors values_of(const torch::nn::Module& model) {
  Tensors values;
  for (const auto& parameter : model.named_parameters()) values[parameter.key()] = parameter.value().detach().clone();
  return values;
}

/// Of the whole tensors of one process.
Tensors merged(const Tensors& all) {
  Tensors merged;
  for (const auto& [name, value] : all) {
    if (!has(name, "lora_")) merged[without_base(name)] = value;
  }
  for (const std::string layer : {"first", "second"}) {
    merged[layer + ".weight"] = all.at(layer + ".base.weight") + 0.5 * all.at(layer + ".lora_b").matmul(all.at(layer + ".lora_a"));
  }
  return merged;
}

Tensors all_of(torch::nn::Module& model, FullWeightsOptions options) {
  Tensors found;
  for (const auto& bucket : fsdp::full_weights(model, std::move(options))) {
    for (const auto& [name, weight] : bucket.weights) EXPECT_TRUE(found.emplace(name, weight.clone()).second) << name;
  }
  return found;
}

void expect_same(const Tensors& found, const Tensors& expected, at::ScalarType dtype = at::kFloat) {
  ASSERT_EQ(found.size(), expected.size());
  for (const auto& [name, value] : expected) EXPECT_TRUE(same_bits(found.at(name), value.to(dtype))) << name;
}

TEST(MergedWeights, AreThoseOfTheMergedModelOfOneProcess) {
  run_ranks(
      4,
      [](int rank) {
        const auto line = fsdp::init_device_mesh("cpu", {{"shard", -1}});
        const auto plane = fsdp::init_device_mesh("cpu", {{"outer", 2}, {"shard", 2}});
        const std::vector<std::pair<std::string, fsdp::FullyShardOptions>> shardings = {
            {"elements", {.mesh = line, .units = fsdp::each<LoraLinearImpl>()}},
            {"HFSDP", {.mesh = plane, .units = fsdp::each<LoraLinearImpl>(), .outer_placements = fsdp::Placements::optim()}},
            {"replicated", {.mesh = line, .placements = fsdp::Placements::no_shard()}}};
        for (const auto& [name, options] : shardings) {
          SCOPED_TRACE(name);
          torch::manual_seed(3);
          Net model;
          const auto all = values_of(*model);
          const auto handle = fsdp::fully_shard(*model, options);
          const auto exported = [&](FullWeightsOptions given) {
            given.rename = without_base;
            given.merge_adapters = adapters_of(*model);
            return all_of(*model, std::move(given));
          };
          const auto expected = merged(all);
          for (const std::int64_t bucket_bytes : {1, 1 << 20}) expect_same(exported({.bucket_bytes = bucket_bytes}), expected);
          expect_same(exported({.dtype = at::kBFloat16}), expected, at::kBFloat16);
          expect_same(exported({.ranks = fsdp::WeightReceivers::kFirst}), rank == 0 ? expected : Tensors());
          const std::vector<std::string> some = {"second.base.weight", "last.bias"};
          expect_same(exported({.names = some}),
                      {{"second.weight", expected.at("second.weight")}, {"last.bias", expected.at("last.bias")}});
          for (const auto& [key, value] : handle.full_parameters()) EXPECT_TRUE(same_bits(value, all.at(key))) << key;
          // The merged model computes what the one with adapters does.
          BaseNet plain;
          {
            const torch::NoGradGuard no_grad;
            auto into = plain->named_parameters();
            for (const auto& [key, value] : exported({})) into[key].copy_(value);
          }
          const auto x = torch::randn({6, 5}, at::make_generator<at::CPUGeneratorImpl>(7));
          EXPECT_TRUE(at::allclose(plain->forward(x), model->forward(x), 1e-5, 1e-6));
          // What a step has changed: adapters, and so the merged weights.
          const auto since = std::make_shared<fsdp::WeightSnapshot>();
          expect_same(exported({.since = since}), expected);
          EXPECT_TRUE(exported({.since = since}).empty());
          fsdp::SGD optimizer(*model, {.lr = 0.5});
          model->forward(x).square().mean().backward();
          optimizer.step();
          optimizer.zero_grad();
          const auto whole = exported({});
          const auto changed = exported({.since = since});
          for (const std::string weight : {"first.weight", "second.weight"}) EXPECT_TRUE(same_bits(changed.at(weight), whole.at(weight)));
        }
      },
      std::chrono::seconds(200));
}

TEST(MergedWeights, TakeSeveralAdaptersAndTransposedWeights) {
  run_ranks(2, [](int) {
    struct ModelImpl : torch::nn::Module {
      ModelImpl() {
        register_parameter("w", draw({6, 4}));
        for (const std::string one : {"1", "2"}) {
          register_parameter("up" + one, draw({6, 2}));
          register_parameter("down" + one, draw({2, 4}));
        }
        register_parameter("t", draw({4, 6}));
      }
    };
    torch::manual_seed(3);
    ModelImpl model;
    const auto all = values_of(model);
    fsdp::fully_shard(model, {.mesh = fsdp::init_device_mesh("cpu", {{"shard", -1}})});
    const auto found = all_of(model, {.merge_adapters = {{.weight = "w", .up = "up1", .down = "down1"},
                                                         {.weight = "w", .up = "up2", .down = "down2", .scale = -2},
                                                         {.weight = "t", .up = "up2", .down = "down2", .transposed = true}}});
    const auto product = [&](const std::string& one) { return all.at("up" + one).matmul(all.at("down" + one)); };
    expect_same(found, {{"w", all.at("w") + product("1") - 2 * product("2")}, {"t", all.at("t") + product("2").t()}});
  });
}

TEST(MergedWeights, RefuseWhatDoesNotFitOnAllRanks) {
  run_ranks(2, [](int rank) {
    torch::manual_seed(3);
    Net model;
    const auto all = values_of(*model);
    fsdp::fully_shard(*model, {.mesh = fsdp::init_device_mesh("cpu", {{"shard", -1}})});
    const WeightAdapter good = adapters_of(*model).front();
    const auto refused = [&](WeightAdapter adapter, FullWeightsOptions options = {}) {
      options.merge_adapters = {std::move(adapter)};
      const auto text = message_of([&] { fsdp::full_weights(*model, options); });
      model->forward(torch::ones({2, 5})).sum().backward();  // training goes on
      return text;
    };
    const auto changed = [&](auto change) {
      auto adapter = good;
      change(adapter);
      return adapter;
    };
    auto text = refused(changed([](auto& adapter) { adapter.weight = "first.weight"; }));
    EXPECT_TRUE(has(text, "parameter 'first.weight' can't be merged with its adapter: the model has no parameter 'first.weight'")) << text;
    text = refused(changed([](auto& adapter) { adapter.up = "no such"; }));
    EXPECT_TRUE(has(text, "the model has no parameter 'no such'")) << text;
    text = refused(changed([](auto& adapter) { std::swap(adapter.up, adapter.down); }));
    EXPECT_TRUE(has(text, "up is [2, 5] and down is [7, 2], whose product is not [7, 5]")) << text;
    text = refused(changed([](auto& adapter) { adapter.transposed = true; }));
    EXPECT_TRUE(has(text, "whose product is not [5, 7]")) << text;
    text = refused(changed([](auto& adapter) { adapter.weight = "first.base.bias"; }));
    EXPECT_TRUE(has(text, "'first.base.bias' is [7], and no matrix")) << text;
    text = refused(good, {.names = {{"first.lora_a"}}});
    EXPECT_TRUE(has(text, "'first.lora_a' is not sent: merge_adapters leaves adapters out")) << text;
    text = refused(good, {.rename = [](const std::string&) { return std::string("x"); }});
    EXPECT_TRUE(has(text, "'first.base.weight' and 'first.base.bias' would both be named 'x'")) << text;
    text = refused(good, {.rename = [](const std::string&) -> std::string { throw std::runtime_error("no name"); }});
    EXPECT_TRUE(has(text, "rename failed for 'first.base.weight': no name")) << text;
    // On one rank only.
    text = refused(changed([&](auto& adapter) { adapter.scale = 1 + rank; }));
    EXPECT_TRUE(has(text, "rank 0 has ''first.base.weight'") && has(text, " + 1 * ") && has(text, " + 2 * ")) << text;
    text = refused(changed([&](auto& adapter) { adapter.weight = rank == 1 ? "nowhere" : adapter.weight; }));
    EXPECT_TRUE(has(text, "the model has no parameter 'nowhere'")) << text;
    expect_same(all_of(*model, {.rename = without_base, .merge_adapters = adapters_of(*model)}), merged(all));
  });
}

TEST(MergedWeights, RefuseTensorParallelOnes) {
  run_ranks(2, [](int) {
    const auto grid = fsdp::init_device_mesh("cpu", {{"tp", 2}, {"shard", 1}});
    struct ModelImpl : torch::nn::Module {
      ModelImpl() {
        register_parameter("w", torch::ones({2, 3}));
        register_parameter("up", torch::ones({4, 1}));
        register_parameter("down", torch::ones({1, 3}));
      }
    } model;
    fsdp::fully_shard(model, {.mesh = grid["shard"],
                              .tensor_parallel = [&](const std::string& name, const at::Tensor&) -> std::optional<fsdp::TensorParallel> {
                                if (name == "w") return fsdp::TensorParallel{grid["tp"], 0};
                                return std::nullopt;
                              }});
    const auto text = message_of([&] { fsdp::full_weights(model, {.merge_adapters = {{.weight = "w", .up = "up", .down = "down"}}}); });
    EXPECT_TRUE(has(text, "parameter 'w' can't be merged with its adapter: 'w' is tensor-parallel")) << text;
  });
}

}  // namespace merged_weights_test
