// [Two live gradients]: how many units' unreduced gradients exist at once.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>

#include "fsdp/fsdp.h"
#include "support/multi_rank.h"
#include "support/predicted_memory.h"
#include "support/stack.h"

namespace live_gradients_test {

using fsdp::testing::line;
using fsdp::testing::run_ranks;
using fsdp::testing::unit_table;

class LiveGradients : public ::testing::TestWithParam<int> {};

/// A first layer on the model's input: nothing needs its weights in backward, so its gradients arrive without an entry.
struct EmbeddingsImpl : torch::nn::Module {
  EmbeddingsImpl()
      : embedding(register_module("embedding", torch::nn::Embedding(12, 16))), blocks(register_module("blocks", torch::nn::ModuleList())) {
    for (int k = 0; k < 4; ++k) blocks->push_back(torch::nn::Linear(16, 16));
  }
  at::Tensor forward(const at::Tensor& tokens) {
    auto x = embedding(tokens);
    for (std::size_t k = 0; k < blocks->size(); ++k) x = torch::tanh(blocks->at<torch::nn::LinearImpl>(k).forward(x));
    return x;
  }
  torch::nn::Embedding embedding;
  torch::nn::ModuleList blocks;
};

TEST_P(LiveGradients, AreTwoAlsoWhereGradientsComeWithoutAnEntry) {
  run_ranks(GetParam(), [] {
    const auto mesh = line();
    torch::manual_seed(3);
    EmbeddingsImpl model;
    const auto units = unit_table(model, {"", "embedding", "blocks.0", "blocks.1", "blocks.2", "blocks.3"}, mesh.size());
    auto sharded = fsdp::fully_shard(model, {.mesh = mesh, .units = fsdp::each<torch::nn::EmbeddingImpl, torch::nn::LinearImpl>()});
    for (int step = 0; step < 3; ++step) {
      model.forward(torch::arange(8)).square().sum().backward();
      sharded.zero_grad();
    }
    EXPECT_EQ(sharded.memory_stats().unreduced_gradients.peak, mesh.size() == 1 ? 0 : 2 * units[2].second.trainable_full);
    EXPECT_LT(units[1].second.trainable_full, units[2].second.trainable_full);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, LiveGradients, ::testing::Values(1, 2, 4), [](const auto& info) { return std::to_string(info.param); });

}  // namespace live_gradients_test
