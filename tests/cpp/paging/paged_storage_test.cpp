// What a sharded parameter is to its user: a tensor that can be read, written, viewed, printed and copied as before, with no memory of its
// own.

#include "paging/paged_storage.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/trap_key.h"
#include "fsdp/fsdp.h"
#include "support/twins.h"

namespace fsdp {
namespace paged_storage_test {

using testing::batch;
using testing::each_linear;
using testing::expect_same;
using testing::has;
using testing::line;
using testing::make_net;
using testing::message_of;
using testing::Net;
using testing::values_of;

struct Write {
  std::string name;
  std::function<void(Net&)> apply;
};

std::vector<Write> writes() {
  return {
      {"copy_",
       [](Net& net) {
         net.second->weight.copy_(testing::normal({10, 10}, 5));
       }},
      {"data()", [](Net& net) { net.second->weight.data().mul_(3); }},
      {"detach()", [](Net& net) { net.second->bias.detach().fill_(2); }},
      {"init::xavier_uniform_", [](Net& net) { torch::nn::init::xavier_uniform_(net.second->weight); }},
      {"init::constant_", [](Net& net) { torch::nn::init::constant_(net.second->bias, 0.5); }},
      {"init::orthogonal_", [](Net& net) { torch::nn::init::orthogonal_(net.second->weight); }},
      {"a flat view", [](Net& net) { net.second->weight.view(-1).slice(0, 37, 71).fill_(7); }},
      {"a row", [](Net& net) { net.second->weight[4].zero_(); }},
      {"a transpose", [](Net& net) { net.second->weight.t().narrow(0, 2, 3).add_(1); }},
      {"index_put_",
       [](Net& net) {
         net.second->weight.index_put_({torch::tensor({1, 8})}, 4.0);
       }},
      {"out=", [](Net& net) { at::mul_out(net.second->weight, net.second->weight, net.second->weight); }},
      {"a foreach operator", [](Net& net) { torch::_foreach_mul_(net.parameters(), 0.5); }},
      {"the module's reset_parameters", [](Net& net) { net.second->reset_parameters(); }},
      {"every parameter in a loop",
       [](Net& net) {
         for (auto& parameter : net.parameters()) parameter.clamp_(-0.1, 0.1);
       }},
      {"another parameter of the unit in the same operator", [](Net& net) { net.second->weight.mul_(net.second->bias.unsqueeze(1)); }},
  };
}

TEST(PagedStorage, WritesAreWrittenBack) {
  testing::over_ranks([] {
    const auto mesh = line();
    for (const auto& strategy : testing::all_strategies()) {
      for (const auto& write : writes()) {
        const auto what = strategy + ", " + write.name;
        const torch::NoGradGuard no_grad;
        const auto plain = make_net();
        const auto model = make_net();
        auto sharded = fully_shard(*model, {.mesh = mesh, .units = each_linear(), .placements = Placements::from_name(strategy)});
        for (auto* net : {plain.get(), model.get()}) {
          torch::manual_seed(3);
          write.apply(*net);
        }
        // Every unit is used, so that the written one is evicted and gathered again.
        const auto before = plain->forward(batch(0));
        for (int pass = 0; pass < 2; ++pass) EXPECT_TRUE(torch::equal(model->forward(batch(0)), before)) << what;
        expect_same(sharded.full_parameters(), values_of(*plain), 0, what);
      }
    }
  });
}

TEST(PagedStorage, WritesAreInTheShardsBeforeAnyEviction) {
  testing::over_ranks([] {
    const torch::NoGradGuard no_grad;
    const auto plain = make_net();
    const auto model = make_net();
    auto sharded = fully_shard(*model, {.mesh = line(), .units = each_linear()});
    plain->third->weight.add_(1);
    model->third->weight.add_(1);
    for (const auto& shard : sharded.parameter_shards()) {
      const auto whole = plain->named_parameters()[shard.name].view(-1);
      EXPECT_TRUE(torch::equal(shard.value, whole.narrow(0, shard.offset, shard.value.numel()))) << shard.name;
    }
  });
}

// Each rank's slice is its own word: what a rank writes outside of it is dropped at eviction.
TEST(PagedStorage, TheOwnersWriteCounts) {
  testing::run_ranks(2, [](int rank) {
    const torch::NoGradGuard no_grad;
    const auto model = make_net();
    auto sharded = fully_shard(*model, {.mesh = line(), .units = each_linear()});
    model->second->weight.fill_(rank);
    model->second->bias.fill_(rank);
    const auto full = sharded.full_parameters();
    const auto shards = sharded.parameter_shards();
    for (const std::size_t i : {2, 3}) {
      ASSERT_EQ(full[i].first, i == 2 ? "second.weight" : "second.bias");
      const auto own = full[i].second.view(-1).narrow(0, shards[i].offset, shards[i].value.numel());
      EXPECT_TRUE((own == rank).all().item<bool>()) << full[i].first;
    }
  });
}

TEST(PagedStorage, WritesBetweenBackwardAndStepCount) {
  testing::over_ranks([](int rank) {
    const auto plain = make_net();
    const auto model = make_net();
    auto sharded = fully_shard(*model, {.mesh = line(), .units = each_linear()});
    SGD optimizer(*model, {.lr = 0.5});
    model->forward(batch(rank)).sum().backward();
    for (auto* net : {plain.get(), model.get()}) {
      const torch::NoGradGuard no_grad;
      net->first->weight.fill_(1);
    }
    const auto gradients = sharded.full_gradients();
    optimizer.step();
    const torch::NoGradGuard no_grad;
    plain->first->weight.sub_(0.5 * gradients[0].second);
    expect_same({sharded.full_parameters()[0]}, {values_of(*plain)[0]}, 1e-6, "first.weight");
  });
}

TEST(PagedStorage, AWriteSurvivesAFailedBackward) {
  testing::over_ranks([](int rank) {
    const auto model = make_net();
    auto sharded = fully_shard(*model, {.mesh = line(), .units = each_linear()});
    auto hidden = model->second(at::tanh(model->first(batch(rank))));
    hidden.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("out of luck"); });
    auto loss = model->third(hidden).sum();
    {
      const torch::NoGradGuard no_grad;
      model->third->bias.fill_(4);  // Its unit is present, and stays so until backward dies.
    }
    EXPECT_TRUE(has(message_of<std::exception>([&] { loss.backward(); }), "out of luck"));
    sharded.reset();
    const auto bias = sharded.full_parameters().back();
    EXPECT_TRUE(torch::equal(bias.second, at::full({3}, 4.0F))) << bias.first;
  });
}

TEST(PagedStorage, AddressOfAnEvictedParameterIsAnError) {
  testing::over_ranks([] {
    const auto model = make_net();
    const auto mesh = line();
    if (mesh.size() == 1) return;  // [Alone] Nothing is evicted.
    auto sharded = fully_shard(*model, {.mesh = mesh, .units = each_linear()});
    const auto message = message_of<c10::Error>([&] { model->second->weight.data_ptr<float>(); });
    EXPECT_TRUE(has(message, "call unshard()")) << message;
    EXPECT_NE(message_of<c10::Error>([&] { model->second->weight.storage().data(); }), "no error");
    EXPECT_NE(message_of<c10::Error>([&] { model->second->weight.accessor<float, 2>(); }), "no error");

    // Unsharded, it has one.
    auto unit = handle(*model->second);
    unit.unshard();
    EXPECT_EQ(model->second->weight.data_ptr<float>()[3], make_net()->second->weight.data_ptr<float>()[3]);
    unit.reshard();
    EXPECT_NE(message_of<c10::Error>([&] { model->second->weight.data_ptr<float>(); }), "no error");
  });
}

/// torch 2.11's storages do not notice who asks for an address.
template <typename Storage>
concept NoticesAddresses = requires(Storage& storage) {
  storage.clear_materializer();
};

// A pointer to a present parameter is good for writing until its unit is freed; each rank keeps its slice.
TEST(PagedStorage, WritesThroughPointers) {
  if (!NoticesAddresses<c10::StorageImpl>) GTEST_SKIP();
  testing::over_ranks([](int rank) {
    const torch::NoGradGuard no_grad;
    for (const auto& strategy : testing::all_strategies()) {
      const auto plain = make_net();
      const auto model = make_net();
      auto sharded = fully_shard(*model, {.mesh = line(), .units = each_linear(), .placements = Placements::from_name(strategy)});
      auto unit = handle(*model->second);
      for (int pass = 0; pass < 2; ++pass) {
        unit.unshard();
        for (auto* net : {plain.get(), model.get()}) {
          auto* values = net->second->weight.data_ptr<float>();
          for (int i = 0; i < 100; ++i) values[i] += static_cast<float>(i);
        }
        unit.reshard();
        expect_same(sharded.full_parameters(), values_of(*plain), 0, strategy);
        // Present because an operator has used it, and used again after the pointer was taken.
        for (auto* net : {plain.get(), model.get()}) {
          net->forward(batch(rank));
          net->third->bias.accessor<float, 1>()[2] = 7;
          net->third(at::ones({1, 10}));
          net->third->weight.mutable_data_ptr<float>()[29] = 3;
        }
        model->first(batch(rank));
        expect_same(sharded.full_parameters(), values_of(*plain), 0, strategy);
      }
    }
  });
}

TEST(PagedStorage, IsReadAsBefore) {
  testing::over_ranks([] {
    const auto plain = make_net();
    const auto model = make_net();
    const auto& weight = model->second->weight;
    const auto sharded = fully_shard(*model, {.mesh = line(), .units = each_linear()});
    EXPECT_EQ(weight.sizes(), plain->second->weight.sizes());
    EXPECT_EQ(weight.strides(), plain->second->weight.strides());
    EXPECT_TRUE(weight.requires_grad() && weight.is_leaf() && weight.is_contiguous());
    EXPECT_EQ(weight.scalar_type(), at::kFloat);

    std::ostringstream expected, printed;
    expected << plain->second->weight;
    printed << weight;
    EXPECT_EQ(printed.str(), expected.str());

    const auto& reference = plain->second->weight;
    EXPECT_EQ(weight.norm().item<float>(), reference.norm().item<float>());
    EXPECT_EQ(weight[3][4].item<float>(), reference[3][4].item<float>());
    EXPECT_TRUE(torch::equal(weight.to(at::kDouble), reference.to(at::kDouble)));
    EXPECT_TRUE(torch::equal(weight.t().contiguous(), reference.t()));
    EXPECT_TRUE(torch::equal(at::cat({weight, model->first->weight}, 1), at::cat({reference, plain->first->weight}, 1)));
  });
}

TEST(PagedStorage, CopiesAreOrdinaryTensors) {
  testing::over_ranks([](int rank) {
    const auto plain = make_net();
    const auto model = make_net();
    const auto sharded = fully_shard(*model, {.mesh = line(), .units = each_linear()});
    std::vector<at::Tensor> copies;
    for (const auto& parameter : model->parameters()) {
      copies.push_back(parameter.detach().clone());
      copies.push_back(at::zeros_like(parameter));
      copies.push_back(parameter.to(at::kDouble));
    }
    model->forward(batch(rank));  // Evicts.
    std::size_t i = 0;
    for (const auto& parameter : plain->parameters()) {
      for (std::size_t k = 0; k < 3; ++k) EXPECT_FALSE(copies[i + k].key_set().has(kTrapKey));
      EXPECT_TRUE(torch::equal(copies[i], parameter));
      EXPECT_EQ(copies[i + 1].count_nonzero().item<std::int64_t>(), 0);
      EXPECT_TRUE(torch::equal(copies[i + 2], parameter.to(at::kDouble)));
      i += 3;
    }
  });
}

TEST(PagedStorage, ACloneOfAModuleIsPlain) {
  testing::over_ranks([](int rank) {
    torch::manual_seed(1);
    torch::nn::Sequential model(torch::nn::Linear(6, 10), torch::nn::Tanh(), torch::nn::Linear(10, 3));
    const auto expected = model->forward(batch(rank)).detach();
    const auto sharded = fully_shard(*model, {.mesh = line(), .units = each_linear()});
    const auto copy = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(model->clone());
    for (const auto& parameter : copy->parameters()) EXPECT_FALSE(parameter.key_set().has(kTrapKey));
    const auto output = copy->forward(batch(rank));
    EXPECT_TRUE(torch::equal(output, expected));
    output.sum().backward();
    for (const auto& parameter : copy->parameters()) EXPECT_TRUE(parameter.grad().defined());
    for (const auto& shard : sharded.gradient_shards()) EXPECT_FALSE(shard.value.defined()) << shard.name;
  });
}

// A view of an evicted parameter is as good as the parameter: its unit is gathered when the view is used.
TEST(PagedStorage, ViewsOutliveEviction) {
  testing::over_ranks([](int rank) {
    const auto plain = make_net();
    const auto model = make_net();
    const auto sharded = fully_shard(*model, {.mesh = line(), .units = each_linear(), .prefetch_depth = 0});
    const auto view = model->first->weight.view({5, 12}).narrow(0, 1, 3);
    const auto rows = model->second->weight.unbind(0);
    model->forward(batch(rank));
    if (line().size() > 1) {
      EXPECT_NE(message_of<c10::Error>([&] { view.data_ptr<float>(); }), "no error");
    }
    EXPECT_TRUE(torch::equal(view, plain->first->weight.view({5, 12}).narrow(0, 1, 3)));
    EXPECT_TRUE(torch::equal(rows[7], plain->second->weight[7]));
  });
}

// torch::save writes storages as they are: that of an evicted unit has no bytes.
TEST(PagedStorage, SavingAnEvictedModelIsAnError) {
  testing::over_ranks([] {
    const auto plain = make_net();
    const auto model = make_net();
    const auto mesh = line();
    const auto sharded = fully_shard(*model, {.mesh = mesh});
    std::ostringstream stream;
    const auto message = message_of<c10::Error>([&] { torch::save(model, stream); });
    EXPECT_EQ(has(message, "call unshard()"), mesh.size() > 1) << message;  // [Alone] Nothing is evicted.

    FSDPModule whole = handle(*model);
    whole.unshard();
    std::stringstream file;
    torch::save(model, file);
    whole.reshard();
    auto loaded = std::make_shared<Net>();
    torch::load(loaded, file);
    expect_same(values_of(*loaded), values_of(*plain), 0, "loaded");
  });
}

/// Its gradient is a tensor of the caller's choice, as it is.
struct Given : torch::autograd::Function<Given> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& parameter, const at::Tensor& gradient) {
    context->saved_data["gradient"] = gradient;
    return parameter.sum();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, torch::autograd::variable_list) {
    return {context->saved_data["gradient"].toTensor().detach(), at::Tensor()};
  }
};

// What autograd delivers may itself be a sharded parameter: it is gathered before the engine takes it in.
TEST(PagedStorage, AGradientThatIsAParameter) {
  struct Case {
    const char* name;
    std::function<at::Tensor(Net&)> target, gradient;
  };
  const std::vector<Case> cases = {
      {"itself", [](Net& net) { return net.second->weight; }, [](Net& net) { return net.second->weight; }},
      {"a view of it", [](Net& net) { return net.second->weight; }, [](Net& net) { return net.second->weight.t(); }},
      {"another's row", [](Net& net) { return net.second->bias; }, [](Net& net) { return net.second->weight[4]; }},
      {"of another unit", [](Net& net) { return net.third->weight; }, [](Net& net) { return net.second->weight.narrow(0, 2, 3); }},
  };
  testing::run_ranks(
      2,
      [&](int rank) {
        for (const auto& strategy : testing::all_strategies()) {
          for (const auto& [name, target, gradient] : cases) {
            const auto what = strategy + ", " + name;
            const auto plain = make_net();
            const auto model = make_net();
            auto sharded = fully_shard(*model, {.mesh = line(), .units = each_linear(), .placements = Placements::from_name(strategy)});
            const auto given = gradient(*model).detach();
            model->forward(batch(rank));
            Given::apply(target(*model), given).backward();
            for (const auto& [key, value] : sharded.full_gradients()) {
              if (!target(*plain).is_same(plain->named_parameters()[key])) continue;
              EXPECT_TRUE(torch::equal(value, gradient(*plain))) << what;
            }
          }
        }
      },
      std::chrono::seconds(30));
}

TEST(PagedStorage, OddShapes) {
  struct Odd : torch::nn::Module {
    Odd()
        : scalar(register_parameter("scalar", torch::tensor(2.0F))),
          empty(register_parameter("empty", at::zeros({0, 3}))),
          transposed(register_parameter("transposed", testing::normal({3, 5}, 9).t())),
          image(register_parameter("image", testing::normal({2, 3, 2, 2}, 10).contiguous(at::MemoryFormat::ChannelsLast))) {}
    at::Tensor scalar, empty, transposed, image;
  };
  testing::over_ranks([] {
    testing::expect_like_plain([] { return std::make_shared<Odd>(); }, {},
                               [](Odd& model, int r) -> std::vector<at::Tensor> {
                                 const auto x = testing::normal({2, 3, 6, 6}, static_cast<std::uint64_t>(r));
                                 const auto y = at::conv2d(x, model.image).square().sum() * model.scalar +
                                                model.transposed.matmul(model.transposed.t()).sum() + model.empty.sum();
                                 y.backward();
                                 return {};
                               });
  });
}

}  // namespace paged_storage_test
}  // namespace fsdp
