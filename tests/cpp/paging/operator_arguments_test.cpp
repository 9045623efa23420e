// What operators do with their arguments beyond what their schemas say.

#include "paging/operator_arguments.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "base/trap_key.h"
#include "fsdp/fsdp.h"
#include "support/twins.h"

namespace fsdp {
namespace operator_arguments_test {

using testing::batch;
using testing::each_linear;
using testing::has;
using testing::line;
using testing::make_net;
using testing::message_of;
using testing::Net;
using testing::normal;
using testing::over_ranks;

struct Query {
  std::string name;
  std::function<at::Tensor(const at::Tensor& parameter)> run;
};

/// With fixed random numbers: what a query gives is the same for equal shapes.
std::vector<Query> shape_queries() {
  const auto number = [](std::int64_t value) { return at::scalar_tensor(value, at::kLong); };
  return {
      {"zeros_like", [](const at::Tensor& p) { return at::zeros_like(p); }},
      {"ones_like", [](const at::Tensor& p) { return at::ones_like(p, at::kDouble); }},
      {"full_like", [](const at::Tensor& p) { return at::full_like(p, 3); }},
      {"empty_like", [](const at::Tensor& p) { return at::empty_like(p).zero_(); }},
      {"rand_like", [](const at::Tensor& p) { return at::rand_like(p); }},
      {"randn_like", [](const at::Tensor& p) { return at::randn_like(p); }},
      {"randint_like", [](const at::Tensor& p) { return at::randint_like(p, 5); }},
      {"new_zeros",
       [](const at::Tensor& p) {
         return p.new_zeros({2, 3});
       }},
      {"new_ones",
       [](const at::Tensor& p) {
         return p.new_ones({2, 3});
       }},
      {"new_full",
       [](const at::Tensor& p) {
         return p.new_full({2, 3}, 4);
       }},
      {"new_empty",
       [](const at::Tensor& p) {
         return p.new_empty({2, 3}).zero_();
       }},
      {"new_empty_strided",
       [](const at::Tensor& p) {
         return p.new_empty_strided({2, 3}, {1, 2}).zero_();
       }},
      {"size", [=](const at::Tensor& p) { return number(at::size(p, 0)); }},
      {"stride", [=](const at::Tensor& p) { return number(at::stride(p, 0)); }},
      {"is_same_size",
       [=](const at::Tensor& p) {
         return number(p.is_same_size(at::ones({10, 10})));
       }},
      {"result_type", [=](const at::Tensor& p) { return number(static_cast<int>(at::result_type(p, at::ones({}, at::kDouble)))); }},
      {"view_as", [](const at::Tensor& p) { return at::ones(p.numel()).view_as(p); }},
      {"reshape_as", [](const at::Tensor& p) { return at::ones(p.numel()).reshape_as(p); }},
      {"expand_as", [](const at::Tensor& p) { return at::ones({1}).expand_as(p); }},
      {"type_as", [](const at::Tensor& p) { return at::ones({3}, at::kDouble).type_as(p); }},
      {"to another's dtype", [](const at::Tensor& p) { return at::ones({3}, at::kDouble).to(p); }},
      {"detach", [](const at::Tensor& p) { return at::zeros_like(p.detach()); }},
      {"of a view of a view", [](const at::Tensor& p) { return at::ones_like(p.detach().detach()); }},
      {"requires_grad_", [](const at::Tensor& p) { return at::zeros_like(p.requires_grad_()); }},
  };
}

// [Order is collective] What takes a shape only touches nothing: one rank alone may do it, without the others.
TEST(OperatorArguments, ShapesGatherNothing) {
  testing::run_ranks(
      2,
      [](int rank) {
        const auto plain = make_net();
        const auto model = make_net();
        auto sharded = fully_shard(*model, {.mesh = line(), .units = each_linear()});
        model->forward(batch(rank)).sum().backward();  // Evicts.
        sharded.reset_wire_stats();
        if (rank == 0) {
          for (const auto& query : shape_queries()) {
            torch::manual_seed(4);
            const auto expected = query.run(plain->second->weight);
            torch::manual_seed(4);
            const auto result = query.run(model->second->weight);
            EXPECT_TRUE(torch::equal(result, expected)) << query.name;
            EXPECT_FALSE(result.key_set().has(kTrapKey)) << query.name;
            EXPECT_EQ(sharded.wire_stats().all_gathers, 0) << query.name;
          }
        }
        handle(*model).engine()->options().mesh.barrier();
        EXPECT_TRUE(torch::equal(model->second->weight, plain->second->weight));
      },
      std::chrono::seconds(30));
}

/// Trains nothing: running statistics that are parameters.
struct Normalized : torch::nn::Module {
  Normalized() {
    for (const auto* name : {"mean", "other"}) register_parameter(name, normal({6}, 3), /*requires_grad=*/false);
    register_parameter("var", normal({6}, 4).abs(), /*requires_grad=*/false);
    layer = register_module("layer", torch::nn::Linear(6, 6));
  }
  at::Tensor operator[](const std::string& name) { return named_parameters()[name]; }
  torch::nn::Linear layer{nullptr};
};

// Schemas of torch's normalizations do not say that they write running statistics.
TEST(OperatorArguments, WritesThatSchemasDoNotDeclare) {
  const auto input = normal({6, 6}, 8);
  const auto statistics = at::native_batch_norm(input, {}, {}, {}, {}, true, 0.3, 1e-5);
  const std::vector<std::pair<const char*, std::function<void(Normalized&)>>> writes = {
      {"batch_norm", [&](Normalized& m) { at::batch_norm(input, {}, {}, m["mean"], m["var"], true, 0.3, 1e-5, false); }},
      {"_batch_norm_impl_index",
       [&](Normalized& m) { at::_batch_norm_impl_index(input, {}, {}, m["mean"], m["var"], true, 0.3, 1e-5, false); }},
      {"native_batch_norm", [&](Normalized& m) { at::native_batch_norm(input, {}, {}, m["mean"], m["var"], true, 0.3, 1e-5); }},
      {"_native_batch_norm_legit",
       [&](Normalized& m) {
         auto mean = m["mean"];
         auto var = m["var"];
         at::_native_batch_norm_legit(input, {}, {}, mean, var, true, 0.3, 1e-5);
       }},
      {"batch_norm_update_stats", [&](Normalized& m) { at::batch_norm_update_stats(input, m["mean"], m["var"], 0.3); }},
      {"instance_norm",
       [&](Normalized& m) {
         at::instance_norm(input.view({1, 6, 6}), {}, {}, m["mean"], m["var"], true, 0.3, 1e-5, false);
       }},
  };
  over_ranks([&] {
    for (const auto& [name, write] : writes) {
      const auto plain = testing::seeded([] { return std::make_shared<Normalized>(); });
      const auto model = testing::seeded([] { return std::make_shared<Normalized>(); });
      auto sharded = fully_shard(*model, {.mesh = line(), .units = each_linear()});
      write(*plain);
      write(*model);
      model->layer(input);
      handle(*model).reshard();
      EXPECT_FALSE(torch::equal((*plain)["mean"], (*plain)["other"])) << name;
      for (const auto* parameter : {"mean", "var", "other"}) {
        EXPECT_TRUE(torch::equal((*model)[parameter], (*plain)[parameter])) << name << ", " << parameter;
      }
    }
    // Without training they read.
    const auto model = testing::seeded([] { return std::make_shared<Normalized>(); });
    const auto sharded = fully_shard(*model, {.mesh = line()});
    at::batch_norm(input, {}, {}, (*model)["mean"], (*model)["var"], false, 0.3, 1e-5, false);
    EXPECT_FALSE(sharded.engine()->units().front()->whole.written);
  });
}

/// as_strided with an offset from the parameter's beginning, on parameters that lie behind others in their unit.
TEST(OperatorArguments, AsStridedStaysInTheParameter) {
  const std::vector<std::pair<const char*, std::function<at::Tensor(Net&)>>> views = {
      {"from the beginning",
       [](Net& net) {
         return net.second->weight.as_strided({3, 2}, {10, 1}, 0);
       }},
      {"without an offset",
       [](Net& net) {
         return net.second->weight.as_strided({3, 2}, {2, 5});
       }},
      {"of a view",
       [](Net& net) {
         return net.second->weight[4].as_strided({2, 2}, {10, 3}, 6);
       }},
      {"a copy", [](Net& net) { return at::as_strided_copy(net.second->weight, {10}, {10}, 7); }},
      {"all of the bias", [](Net& net) { return net.second->bias.as_strided({10}, {1}, 0); }},
      {"the bias's last", [](Net& net) { return net.second->bias.as_strided({1}, {1}, 9); }},
      {"where the storage says that it is",
       [](Net& net) { return net.second->bias.as_strided({3}, {2}, net.second->bias.storage_offset() + 4); }},
      {"scattered", [](Net& net) { return at::as_strided_scatter(net.second->bias, at::ones({2}), {2}, {3}, 1); }},
  };
  over_ranks([&](int rank) {
    const auto plain = make_net();
    const auto model = make_net();
    auto sharded = fully_shard(*model, {.mesh = line(), .units = [](const std::string&, const torch::nn::Module&) { return false; }});
    for (const auto& [name, view] : views) {
      EXPECT_TRUE(torch::equal(view(*model), view(*plain))) << name;
    }
    // Through autograd and in writes alike.
    for (auto* net : {plain.get(), model.get()}) {
      {
        const torch::NoGradGuard no_grad;
        net->second->weight.as_strided({2, 2}, {50, 1}, 3).fill_(2);
      }
      (net->second->weight.as_strided({4}, {11}, 2).square().sum() + net->forward(batch(rank)).sum()).backward();
    }
    EXPECT_TRUE(torch::equal(model->second->weight, plain->second->weight));
    const auto gradient = sharded.full_gradients()[2].second;
    EXPECT_TRUE(torch::allclose(gradient.as_strided({4}, {11}, 2), plain->second->weight.grad().as_strided({4}, {11}, 2), 1e-4, 1e-4) ||
                line().size() > 1);

    const auto outside = [&](at::IntArrayRef size, at::IntArrayRef stride, std::optional<std::int64_t> offset) {
      return message_of([&] { model->second->bias.as_strided(size, stride, offset); });
    };
    for (const auto& message : {outside({11}, {1}, 0), outside({2}, {10}, std::nullopt), outside({1}, {1}, 5000)}) {
      EXPECT_TRUE(has(message, "'second.bias'") && has(message, "as_strided")) << message;
    }
  });
}

}  // namespace operator_arguments_test
}  // namespace fsdp
