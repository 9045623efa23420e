// Models built without memory: the same bits as built whole, whatever their constructors do.

#include "fsdp/deferred_init.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/fsdp.h"
#include "gpt.h"
#include "support/deferred_twins.h"
#include "support/shardings.h"
#include "support/twins.h"

namespace fsdp {
namespace deferred_init_test {

namespace init = torch::nn::init;
using testing::batch;
using testing::each_linear;
using testing::expect_materialized_like_eager;
using testing::expect_same;
using testing::expect_sharded_like_eager;
using testing::has;
using testing::line;
using testing::message_of;
using testing::Net;
using testing::over_ranks;
using testing::run_ranks;
using testing::values_of;
using testing::with_seed;

// Stock models, and the project's own.

TEST(DeferredInit, Transformer) {
  const auto make = [] { return torch::nn::Transformer(torch::nn::TransformerOptions(16, 2, 2, 2).dim_feedforward(24)); };
  expect_sharded_like_eager(make, each<torch::nn::TransformerEncoderLayerImpl, torch::nn::TransformerDecoderLayerImpl>(),
                            [](torch::nn::Transformer& model, int rank) {
                              torch::manual_seed(rank);  // dropout
                              const auto y = model(testing::normal({3, 2, 16}, 1), testing::normal({4, 2, 16}, 2));
                              y.square().mean().backward();
                              return y.detach();
                            });
  run_ranks(1, [&] { expect_materialized_like_eager(make); });
}

TEST(DeferredInit, ExampleGPT) {
  for (const bool tied : {false, true}) {
    const auto make = [&] {
      return GPT(GPTConfig{.vocab = 50, .dim = 16, .layers = 3, .heads = 2, .hidden = 0, .context = 8, .tied = tied});
    };
    expect_sharded_like_eager(make, each<GPTBlockImpl>(), [](GPT& model, int rank) {
      const auto tokens = at::arange(16, at::kLong).add(rank).remainder(50).view({2, 8});
      const auto loss = model->loss(tokens, tokens.add(1).remainder(50));
      loss.backward();
      return loss.detach();
    });
    run_ranks(1, [&] { expect_materialized_like_eager(make); });
  }
}

TEST(DeferredInit, LSTM) {
  const auto make = [] { return torch::nn::LSTM(torch::nn::LSTMOptions(6, 5).num_layers(2).bidirectional(true)); };
  expect_sharded_like_eager(make, {}, [](torch::nn::LSTM& model, int rank) {
    const auto y = std::get<0>(model(testing::normal({3, 2, 6}, static_cast<std::uint64_t>(rank))));
    y.square().mean().backward();
    return y.detach();
  });
  run_ranks(1, [&] { expect_materialized_like_eager(make); });
}

TEST(DeferredInit, ConvolutionsAndBatchNorm) {
  const auto make = [] {
    return torch::nn::Sequential(torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 6, 3).padding(1)), torch::nn::BatchNorm2d(6),
                                 torch::nn::ReLU(), torch::nn::ConvTranspose2d(torch::nn::ConvTranspose2dOptions(6, 4, 2)),
                                 torch::nn::GroupNorm(torch::nn::GroupNormOptions(2, 4)), torch::nn::Conv2d(4, 2, 1),
                                 torch::nn::BatchNorm2d(2), torch::nn::PReLU(), torch::nn::Flatten(), torch::nn::Linear(2 * 7 * 7, 3));
  };
  expect_sharded_like_eager(make, each<torch::nn::Conv2dImpl, torch::nn::LinearImpl>(), [](torch::nn::Sequential& model, int rank) {
    const auto y = model->forward(testing::normal({4, 3, 6, 6}, static_cast<std::uint64_t>(rank)));
    y.square().mean().backward();
    return y.detach();
  });
  run_ranks(1, [&] { expect_materialized_like_eager(make); });
}

TEST(DeferredInit, AttentionAndEmbeddings) {
  struct Model : torch::nn::Module {
    Model()
        : embedding(register_module("embedding", torch::nn::Embedding(torch::nn::EmbeddingOptions(12, 8).padding_idx(3)))),
          attention(register_module(
              "attention", torch::nn::MultiheadAttention(torch::nn::MultiheadAttentionOptions(8, 2).add_bias_kv(true).kdim(6).vdim(6)))),
          bilinear(register_module("bilinear", torch::nn::Bilinear(3, 4, 5))) {}
    torch::nn::Embedding embedding;
    torch::nn::MultiheadAttention attention;
    torch::nn::Bilinear bilinear;
  };
  run_ranks(1, [] { expect_materialized_like_eager([] { return std::make_shared<Model>(); }); });
}

// Every initialiser of torch::nn::init.
TEST(DeferredInit, Initialisers) {
  struct Model : torch::nn::Module {
    Model() {
      const auto make = [this](const std::string& name, std::vector<std::int64_t> shape) {
        return register_parameter(name, torch::empty(shape));
      };
      init::constant_(make("constant", {3, 4}), 2.5);
      init::dirac_(make("dirac", {4, 3, 5}));
      init::eye_(make("eye", {3, 5}));
      init::kaiming_normal_(make("kaiming_normal", {6, 7}));
      init::kaiming_uniform_(make("kaiming_uniform", {6, 7}), std::sqrt(5));
      init::normal_(make("normal", {5, 5}), 1, 2);
      init::ones_(make("ones", {4}));
      init::orthogonal_(make("orthogonal", {6, 4}));
      init::orthogonal_(make("orthogonal_wide", {3, 8}));
      init::sparse_(make("sparse", {8, 6}), 0.5);
      init::uniform_(make("uniform", {5, 5}), -1, 1);
      init::xavier_normal_(make("xavier_normal", {6, 7}));
      init::xavier_uniform_(make("xavier_uniform", {6, 7}));
      init::zeros_(make("zeros", {4}));
    }
  };
  run_ranks(1, [] { expect_materialized_like_eager([] { return std::make_shared<Model>(); }); });
}

// Orders of initialisation.

struct Block : torch::nn::Module {
  explicit Block(std::int64_t width)
      : up(register_module("up", torch::nn::Linear(width, 2 * width))),
        down(register_module("down", torch::nn::Linear(2 * width, width))) {}
  torch::nn::Linear up, down;
};

struct Blocks : torch::nn::Module {
  Blocks() : blocks(register_module("blocks", torch::nn::ModuleList())) {
    for (int i = 0; i < 3; ++i) blocks->push_back(std::make_shared<Block>(5));
  }
  Block& block(std::size_t i) { return blocks->at<Block>(i); }
  torch::nn::ModuleList blocks;
};

at::Tensor no_run(const std::shared_ptr<Blocks>&, int) { return at::zeros({1}); }

TEST(DeferredInit, InitialisedInALoopOverAllParameters) {
  struct Model : Blocks {
    Model() {
      const torch::NoGradGuard no_grad;
      for (auto& item : named_parameters()) {
        if (item.value().dim() == 1) {
          item.value().zero_();
        } else {
          item.value().normal_(0, item.key().ends_with("down.weight") ? 0.01 : 0.02);
        }
      }
      block(1).down->weight.mul_(0.5);
    }
  };
  const auto make = []() -> std::shared_ptr<Blocks> { return std::make_shared<Model>(); };
  expect_sharded_like_eager(make, each<Block>(), no_run);
}

TEST(DeferredInit, UnitsThatTakeFromEachOther) {
  struct Model : Blocks {
    Model() {
      const torch::NoGradGuard no_grad;
      // Each takes what the next was before that was changed; all are changed by a random number drawn last.
      for (std::size_t i = 0; i < 2; ++i) block(i).up->weight.copy_(block(i + 1).up->weight * 2);
      block(2).up->weight.normal_();
      for (std::size_t i = 3; i-- > 0;) block(i).up->weight.add_(block(0).up->weight.mean());
      const auto kept = block(0).down->weight.clone();
      block(0).down->weight.uniform_();
      block(1).down->weight.copy_(kept);
      block(2).down->weight[1].add_(kept[2]);
      const auto together = at::rand({3, 10});
      for (std::size_t i = 0; i < 3; ++i) block(i).up->bias.copy_(together[static_cast<std::int64_t>(i)]);
      for (auto& parameter : parameters()) parameter.mul_(at::rand({1}));
    }
  };
  const auto make = []() -> std::shared_ptr<Blocks> { return std::make_shared<Model>(); };
  expect_sharded_like_eager(make, each<Block>(), no_run);
  run_ranks(1, [&] { expect_materialized_like_eager(make); });
}

TEST(DeferredInit, ListsOfTensorsAtOnce) {
  struct Model : Blocks {
    Model() {
      const torch::NoGradGuard no_grad;
      torch::_foreach_mul_(parameters(), 0.5);
      torch::_foreach_add_(parameters(), torch::_foreach_mul(parameters(), std::vector<at::Scalar>(parameters().size(), 2)));
      torch::_foreach_zero_({block(0).up->bias, block(1).up->bias});
      const auto norms = torch::_foreach_norm(parameters());
      register_buffer("norms", at::stack(norms));
      const auto all = torch::nn::utils::parameters_to_vector(block(2).parameters());
      torch::nn::utils::vector_to_parameters(all * 3, block(2).parameters());
    }
  };
  const auto make = []() -> std::shared_ptr<Blocks> { return std::make_shared<Model>(); };
  expect_sharded_like_eager(make, each<Block>(), no_run);
  run_ranks(1, [&] { expect_materialized_like_eager(make); });
}

struct Projection : torch::nn::Module {
  explicit Projection(const at::Tensor& tensor) : weight(register_parameter("weight", tensor)) {}
  at::Tensor weight;
};

TEST(DeferredInit, TiedParametersStayTied) {
  struct Model : torch::nn::Module {
    Model()
        : embedding(register_module("embedding", torch::nn::Embedding(12, 10))),
          middle(register_module("middle", torch::nn::Linear(10, 10))),
          head(register_module("head", std::make_shared<Projection>(embedding->weight))) {
      const torch::NoGradGuard no_grad;
      head->weight.normal_(0, 0.02);
    }
    torch::nn::Embedding embedding;
    torch::nn::Linear middle;
    std::shared_ptr<Projection> head;
  };
  const auto make = [] { return std::make_shared<Model>(); };
  run_ranks(1, [&] { expect_materialized_like_eager(make); });
  expect_sharded_like_eager(make, each<torch::nn::EmbeddingImpl, torch::nn::LinearImpl, Projection>(),
                            [](const std::shared_ptr<Model>& model, int rank) {
                              EXPECT_TRUE(model->embedding->weight.is_same(model->head->weight));
                              const auto tokens = at::arange(5, at::kLong).add(rank);
                              const auto y = at::linear(model->middle(model->embedding(tokens)), model->head->weight);
                              y.square().mean().backward();
                              return y.detach();
                            });
}

TEST(DeferredInit, ParametersThatAreViews) {
  struct Model : torch::nn::Module {
    Model() {
      const auto all = at::randn({9, 4});
      const auto parts = all.chunk(3);
      register_parameter("q", parts[0]);
      register_parameter("k", parts[1]);
      register_parameter("v", at::randn({4, 6}).t());
      register_parameter("last", at::randn({3, 4, 5, 6}).contiguous(at::MemoryFormat::ChannelsLast));
      register_buffer("whole", at::arange(6));
      register_buffer("half", named_buffers()["whole"].narrow(0, 3, 3));
    }
  };
  const auto make = [] { return std::make_shared<Model>(); };
  run_ranks(1, [&] {
    expect_materialized_like_eager(make);
    const auto model = deferred_init(make);
    materialize(*model);
    model->named_buffers()["whole"].add_(1);
    EXPECT_TRUE(torch::equal(model->named_buffers()["half"], at::arange(4, 7)));
  });
  expect_sharded_like_eager(make, {}, [](const std::shared_ptr<Model>&, int) { return at::zeros({1}); });
}

TEST(DeferredInit, ClonedModules) {
  struct Model : torch::nn::Module {
    Model() {
      const torch::nn::Linear first(4, 5);
      for (int i = 0; i < 3; ++i) {
        const auto copy = std::dynamic_pointer_cast<torch::nn::LinearImpl>(first->clone());
        const torch::NoGradGuard no_grad;
        first->weight.add_(copy->weight * 0.5);
        register_module("copy" + std::to_string(i), copy);
      }
    }
  };
  run_ranks(1, [] { expect_materialized_like_eager([] { return std::make_shared<Model>(); }); });
}

// Placements, meshes, precisions.

/// Tied, frozen, empty, of several dtypes, and with buffers.
struct Odd : torch::nn::Module {
  Odd()
      : embedding(register_module("embedding", torch::nn::Embedding(12, 10))),
        middle(register_module("middle", torch::nn::Linear(10, 10))),
        head(register_module("head", std::make_shared<Projection>(embedding->weight))),
        norm(register_module("norm", torch::nn::BatchNorm1d(10))) {
    middle->bias.set_requires_grad(false);
    register_parameter("half", at::randn({5}, at::kBFloat16));
    register_parameter("index", at::arange(7), /*requires_grad=*/false);
    register_parameter("none", at::empty({0}));
    const torch::NoGradGuard no_grad;
    for (auto& parameter : parameters()) {
      if (parameter.is_floating_point()) parameter.add_(at::rand({1}).to(parameter.scalar_type()));
    }
  }
  at::Tensor forward(const at::Tensor& tokens) {
    return at::linear(middle(embedding(tokens)), head->weight) + at::sum(named_parameters(false)["half"]);
  }
  torch::nn::Embedding embedding;
  torch::nn::Linear middle;
  std::shared_ptr<Projection> head;
  torch::nn::BatchNorm1d norm;
};

TEST(DeferredInit, EverySharding) {
  over_ranks([](int rank) {
    const auto make = [] { return std::make_shared<Odd>(); };
    for (const auto& [name, options, compute] : testing::shardings(each<torch::nn::LinearImpl, Projection>(), "middle")) {
      auto [plain, numbers] = with_seed(make);
      auto [model, same_numbers] = with_seed([&] { return deferred_init(make); });
      const auto whole = testing::parameters_of(*plain);
      const auto reference = fully_shard(*plain, options);
      const auto sharded = fully_shard(*model, options);
      expect_same(sharded.full_parameters(), reference.full_parameters(), 0, name);
      for (const auto& [parameter, value] : sharded.full_parameters()) {
        for (const auto& [other, expected] : whole) {
          if (other == parameter) {
            EXPECT_TRUE(torch::equal(value, expected.to(value.scalar_type()))) << name << " " << parameter;
          }
        }
      }
      const auto tokens = at::arange(6, at::kLong).add(rank);
      EXPECT_TRUE(torch::equal(model->forward(tokens), plain->forward(tokens))) << name;
    }
  });
}

TEST(DeferredInit, IgnoredParametersBecomeOrdinary) {
  over_ranks([] {
    auto [plain, numbers] = with_seed([] { return std::make_shared<Net>(); });
    for (const auto from : {InitialValues::kOwn, InitialValues::kFromRank0}) {
      auto [model, same_numbers] = with_seed([] { return deferred_init([] { return std::make_shared<Net>(); }); });
      (void)fully_shard(*model, {.mesh = line(),
                                 .units = each_linear(),
                                 .ignore = [](const std::string& name, const at::Tensor&) { return name.starts_with("second."); },
                                 .initial_values = from});
      for (const auto& [parameter, expected] :
           {std::pair(model->second->weight, plain->second->weight), std::pair(model->second->bias, plain->second->bias)}) {
        EXPECT_FALSE(is_deferred(parameter));
        EXPECT_TRUE(parameter.requires_grad() && parameter.is_leaf());
        EXPECT_TRUE(torch::equal(at::from_blob(parameter.data_ptr(), parameter.sizes(), at::kFloat), expected));
      }
      model->forward(testing::batch(0)).sum().backward();
      EXPECT_EQ(model->second->weight.grad().sizes(), model->second->weight.sizes());
    }
  });
}

// Between building and sharding.

TEST(DeferredInit, OperatorsOnTheResultAreRecorded) {
  const auto make = [] {
    auto model = std::make_shared<Net>();
    model->to(at::kBFloat16);
    return model;
  };
  run_ranks(1, [&] { expect_materialized_like_eager(make); });
  over_ranks([] {
    const auto change = [](Net& model) {
      const torch::NoGradGuard no_grad;
      model.to(at::kBFloat16);
      init::normal_(model.first->weight, 0, 0.1);
      model.second->weight.mul_(model.first->weight.mean());
      model.second->bias.copy_(at::arange(10));
      model.third->bias.set_data(model.third->bias * 2);
    };
    auto [plain, numbers] = with_seed([] { return std::make_shared<Net>(); });
    change(*plain);
    const auto next = at::rand({2});
    auto [model, same_numbers] = with_seed([] { return deferred_init([] { return std::make_shared<Net>(); }); });
    change(*model);
    EXPECT_TRUE(torch::equal(next, at::rand({2})));
    auto sharded = fully_shard(*model, {.mesh = line(), .units = each_linear()});
    expect_same(sharded.full_parameters(), values_of(*plain), 0, "parameters");
  });
}

TEST(DeferredInit, AForwardBeforeShardingIsAnError) {
  run_ranks(1, [] {
    const auto model = deferred_init([] { return std::make_shared<Net>(); });
    const auto message = message_of([&] { model->forward(batch(0)); });
    EXPECT_TRUE(has(message, "operator 'aten::") && has(message, "call fsdp::fully_shard or fsdp::materialize")) << message;
    materialize(*model);
    EXPECT_EQ(model->forward(batch(0)).sizes(), at::IntArrayRef({4, 3}));
  });
}

TEST(DeferredInit, ModelsThatAreDeferredInPart) {
  struct Pair : torch::nn::Module {
    Pair(torch::nn::Linear first_, torch::nn::Linear second_)
        : first(register_module("first", std::move(first_))), second(register_module("second", std::move(second_))) {}
    at::Tensor forward(const at::Tensor& x) { return second(at::tanh(first(x))); }
    torch::nn::Linear first, second;
  };
  over_ranks([](int rank) {
    const auto linear = [] { return torch::nn::Linear(6, 6); };
    torch::manual_seed(5);
    const auto plain_first = linear();
    Pair plain(plain_first, linear());
    torch::manual_seed(5);
    const auto first = linear();
    Pair model(first, deferred_init(linear));
    const auto sharded = fully_shard(model, {.mesh = line()});  // with and without memory in one unit
    expect_same(sharded.full_parameters(), values_of(plain), 0, "parameters");
    EXPECT_TRUE(torch::equal(model.forward(batch(rank)), plain.forward(batch(rank))));
  });
}

/// Keeps tensors that no module knows of.
struct Secretive : torch::nn::Module {
  Secretive()
      : layer(register_module("layer", torch::nn::Linear(6, 6))), mask(at::ones({6, 6}).tril()), noise(at::randn({6})), row(mask[2]) {}
  at::Tensor forward(const at::Tensor& x) { return layer(x).matmul(mask) * noise + row; }
  torch::nn::Linear layer;
  at::Tensor mask, noise, row;
};

TEST(DeferredInit, TensorsThatAreNeitherParametersNorBuffers) {
  over_ranks([](int rank) {
    const auto make = [] { return std::make_shared<Secretive>(); };
    auto [plain, numbers] = with_seed(make);
    auto [model, same_numbers] = with_seed([&] { return deferred_init(make); });
    auto [whole, ignored] = with_seed([&] { return deferred_init(make); });
    const auto sharded = fully_shard(*model, {.mesh = line()});
    materialize(*whole);
    EXPECT_TRUE(is_deferred(model->mask));
    EXPECT_TRUE(torch::equal(model->forward(batch(rank)), plain->forward(batch(rank))));
    EXPECT_TRUE(torch::equal(whole->forward(batch(rank)), plain->forward(batch(rank))));
    EXPECT_FALSE(is_deferred(model->mask));
    model->mask[2][0] = 5;  // views stay views
    EXPECT_EQ(model->row[0].item<float>(), 5);
  });
}

/// Keeps what it has computed from a parameter, and with it what accumulates the parameter's gradient.
struct WithGraph : torch::nn::Module {
  WithGraph() : layer(register_module("layer", torch::nn::Linear(6, 6))), sum(layer->weight.sum()) {}
  torch::nn::Linear layer;
  at::Tensor sum;
};

TEST(DeferredInit, ConstructorsThatKeepAGraph) {
  over_ranks([](int rank) {
    const auto make = [] { return std::make_shared<WithGraph>(); };
    auto [plain, numbers] = with_seed(make);
    auto [model, same_numbers] = with_seed([&] { return deferred_init(make); });
    auto [whole, ignored] = with_seed([&] { return deferred_init(make); });
    const auto mesh = line();
    const auto sharded = fully_shard(*model, {.mesh = mesh});
    materialize(*whole);
    for (int r = 0; r < mesh.size(); ++r) plain->layer(batch(r)).square().sum().backward();
    model->layer(batch(rank)).square().sum().backward();
    EXPECT_TRUE(sharded.full_gradients()[0].second.allclose(plain->layer->weight.grad() / mesh.size(), 1e-4));
    for (int r = 0; r < mesh.size(); ++r) whole->layer(batch(r)).square().sum().backward();
    EXPECT_TRUE(torch::equal(whole->layer->weight.grad(), plain->layer->weight.grad()));
  });
}

TEST(DeferredInit, DefaultDtypes) {
  run_ranks(1, [] {
    const auto make = [] {
      torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
      auto model = std::make_shared<Net>();
      model->register_parameter("counted", at::arange(0, 1, 0.25) + at::zeros({4}));
      torch::set_default_dtype(caffe2::TypeMeta::Make<float>());
      return model;
    };
    expect_materialized_like_eager(make);
    EXPECT_EQ(deferred_init(make)->first->weight.scalar_type(), at::kDouble);
  });
}

}  // namespace deferred_init_test
}  // namespace fsdp
