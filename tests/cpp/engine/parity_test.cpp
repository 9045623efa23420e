// fully_shard against the same model whole in one process: losses, gradients and parameters after several steps.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "fsdp/fsdp.h"
#include "gpt.h"
#include "support/multi_rank.h"
#include "support/reference.h"

namespace parity_test {

using fsdp::testing::expect_parity;
using fsdp::testing::Task;

at::Tensor normal(at::IntArrayRef shape, std::uint64_t seed) {
  auto generator = at::detail::createCPUGenerator(seed);
  return at::randn(shape, generator);
}

Task gpt(bool tied) {
  const GPTConfig config{.vocab = 50, .dim = 24, .layers = 3, .heads = 2, .context = 8, .tied = tied};
  return {.make = [config] { return GPT(config).ptr(); },
          .loss =
              [config](torch::nn::Module& model, int step, std::int64_t begin, std::int64_t end) {
                auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(step));
                const auto tokens = at::randint(config.vocab, {4, 9}, generator, at::kLong).slice(0, begin, end);
                return dynamic_cast<GPTImpl&>(model).loss(tokens.slice(1, 0, 8), tokens.slice(1, 1, 9));
              },
          .units = fsdp::each<GPTBlockImpl>()};
}

Task transformer() {
  return {.make = [] { return torch::nn::Transformer(torch::nn::TransformerOptions(32, 4, 2, 2).dim_feedforward(48).dropout(0.0)).ptr(); },
          .loss =
              [](torch::nn::Module& model, int step, std::int64_t begin, std::int64_t end) {
                const auto source = normal({5, 4, 32}, static_cast<std::uint64_t>(step)).slice(1, begin, end);
                const auto target = normal({6, 4, 32}, static_cast<std::uint64_t>(step) + 100).slice(1, begin, end);
                return dynamic_cast<torch::nn::TransformerImpl&>(model).forward(source, target).square().mean();
              },
          .units = fsdp::each<torch::nn::TransformerEncoderLayerImpl, torch::nn::TransformerDecoderLayerImpl>()};
}

struct LSTMModelImpl : torch::nn::Module {
  LSTMModelImpl()
      : lstm(register_module("lstm", torch::nn::LSTM(torch::nn::LSTMOptions(7, 11).num_layers(2).batch_first(true)))),
        head(register_module("head", torch::nn::Linear(11, 3))) {}
  at::Tensor forward(const at::Tensor& x) { return head(std::get<0>(lstm(x))); }
  torch::nn::LSTM lstm;
  torch::nn::Linear head;
};

Task lstm() {
  return {.make = [] { return std::make_shared<LSTMModelImpl>(); },
          .loss =
              [](torch::nn::Module& model, int step, std::int64_t begin, std::int64_t end) {
                const auto x = normal({4, 5, 7}, static_cast<std::uint64_t>(step)).slice(0, begin, end);
                return dynamic_cast<LSTMModelImpl&>(model).forward(x).square().mean();
              },
          .units = fsdp::each<torch::nn::LSTMImpl>()};
}

Task convolutions() {
  return {.make =
              [] {
                return torch::nn::Sequential(torch::nn::Conv2d(3, 5, 3), torch::nn::GroupNorm(1, 5), torch::nn::ReLU(),
                                             torch::nn::Conv2d(5, 7, 3), torch::nn::Flatten(), torch::nn::Linear(7 * 16, 4))
                    .ptr();
              },
          .loss =
              [](torch::nn::Module& model, int step, std::int64_t begin, std::int64_t end) {
                const auto x = normal({4, 3, 8, 8}, static_cast<std::uint64_t>(step)).slice(0, begin, end);
                return dynamic_cast<torch::nn::SequentialImpl&>(model).forward(x).square().mean();
              },
          .units = fsdp::each<torch::nn::Conv2dImpl, torch::nn::LinearImpl>()};
}

class Parity : public ::testing::TestWithParam<int> {};

TEST_P(Parity, GPT) {
  fsdp::testing::run_ranks(GetParam(), [&] { expect_parity(gpt(false), GetParam()); });
}
TEST_P(Parity, TiedGPT) {
  fsdp::testing::run_ranks(GetParam(), [&] { expect_parity(gpt(true), GetParam()); });
}
TEST_P(Parity, StockTransformer) {
  fsdp::testing::run_ranks(GetParam(), [&] { expect_parity(transformer(), GetParam()); });
}
TEST_P(Parity, LSTM) {
  fsdp::testing::run_ranks(GetParam(), [&] { expect_parity(lstm(), GetParam()); });
}
TEST_P(Parity, Convolutions) {
  fsdp::testing::run_ranks(GetParam(), [&] { expect_parity(convolutions(), GetParam()); });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Parity, ::testing::Values(1, 2, 4), [](const auto& info) { return std::to_string(info.param); });

}  // namespace parity_test
