// Parameters that are tied before sharding.

#include "fsdp/tie_parameters.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <utility>

#include "fsdp/fsdp.h"
#include "support/twins.h"

namespace fsdp {
namespace tie_parameters_test {

using testing::expect_same;
using testing::has;
using testing::line;
using testing::message_of;
using testing::NamedTensors;

struct LanguageModel : torch::nn::Module {
  LanguageModel()
      : embedding(register_module("embedding", torch::nn::Embedding(12, 10))), head(register_module("head", torch::nn::Linear(10, 12))) {
    tie_parameters(*head, head->weight, embedding->weight);
  }
  at::Tensor forward(const at::Tensor& tokens) { return head(at::tanh(embedding(tokens))); }
  torch::nn::Embedding embedding;
  torch::nn::Linear head;
};

at::Tensor tokens(int rank) { return torch::arange(5, at::kLong).add(2 * rank).remainder(12); }

TEST(TieParameters, IsOneParameterWithTheSumOfBothGradients) {
  testing::over_ranks([](int rank) {
    const auto mesh = line();
    for (const bool deferred : {false, true}) {
      const auto make = [] { return std::make_shared<LanguageModel>(); };
      const auto plain = testing::seeded(make);
      EXPECT_EQ(plain->parameters().size(), 3U);  // the tied one is named twice
      const auto model = testing::seeded([&] { return deferred ? deferred_init(make) : make(); });
      auto sharded = fully_shard(*model, {.mesh = mesh, .units = each<torch::nn::EmbeddingImpl, torch::nn::LinearImpl>()});
      EXPECT_EQ(sharded.full_parameters().size(), 2U);
      EXPECT_TRUE(model->head->weight.is_same(model->embedding->weight));
      for (int r = 0; r < mesh.size(); ++r) plain->forward(tokens(r)).square().mean().backward();
      model->forward(tokens(rank)).square().mean().backward();
      NamedTensors expected;
      for (const auto& [name, gradient] : testing::gradients_of(*plain)) {
        if (name != "head.weight") expected.emplace_back(name, gradient / mesh.size());
      }
      expect_same(sharded.full_gradients(), expected, 1e-5, "gradients");
    }
  });
}

// What the assignment alone leaves behind.
TEST(TieParameters, AnAssignmentLeavesTheOldParameter) {
  testing::run_ranks(1, [] {
    LanguageModel model;
    torch::nn::Linear head(10, 12);
    head->weight = model.embedding->weight;
    EXPECT_FALSE(head->parameters()[0].is_same(model.embedding->weight));
    head = torch::nn::Linear(10, 12);
    tie_parameters(*head, head->weight, model.embedding->weight);
    EXPECT_TRUE(head->parameters()[0].is_same(model.embedding->weight));
    EXPECT_TRUE(head->named_parameters()["weight"].is_same(head->weight));
  });
}

TEST(TieParameters, Refusals) {
  testing::run_ranks(1, [] {
    LanguageModel model;
    torch::nn::Linear other(10, 12);
    EXPECT_TRUE(has(message_of([&] { tie_parameters(model, other->weight, model.embedding->weight); }), "does not register"));
    EXPECT_TRUE(has(message_of([&] { tie_parameters(*other, other->bias, model.embedding->weight); }), "can't be one tensor"));
    at::Tensor undefined;
    EXPECT_TRUE(has(message_of([&] { tie_parameters(*other, other->weight, undefined); }), "undefined"));
    fully_shard(model, {.mesh = line()});
    EXPECT_TRUE(has(message_of([&] { tie_parameters(*other, other->weight, model.embedding->weight); }), "before fully_shard"));
  });
}

}  // namespace tie_parameters_test
}  // namespace fsdp
