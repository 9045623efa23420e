// [Large parameters do not wait] Of a unit that encloses others, each is reduced when its own gradient is complete. Here every parameter
// counts as large.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/unit.h"
#include "fsdp/fsdp.h"
#include "support/meshes.h"
#include "support/multi_rank.h"
#include "support/recording_communicator.h"

namespace large_parameters_test {

using fsdp::FullyShardOptions;
using fsdp::Placements;
using fsdp::testing::line;
using fsdp::testing::Log;
using fsdp::testing::plane;
using fsdp::testing::run_ranks;

constexpr std::int64_t kWidth = 16;
constexpr std::int64_t kTokens = 48;

/// An embedding and a head that belong to the root, and blocks between them.
struct LanguageModelImpl : torch::nn::Module {
  LanguageModelImpl() : embedding(register_module("embedding", torch::nn::Embedding(kTokens, kWidth))) {
    for (int k = 0; k < 3; ++k) blocks.push_back(register_module("block" + std::to_string(k), torch::nn::Linear(kWidth, kWidth)));
    norm = register_parameter("norm", torch::ones({kWidth}));
    head = register_parameter("head", torch::randn({kTokens, kWidth}));
    unused = register_parameter("unused", torch::randn({kTokens, kWidth}));
  }
  /// `tied`: the embedding is the head, too.
  at::Tensor forward(const at::Tensor& tokens, bool with_head = true, bool tied = false) {
    auto x = embedding(tokens);
    for (auto& block : blocks) x = torch::tanh(block(x));
    x = x * norm;
    return with_head ? torch::linear(x, tied ? embedding->weight : head) : x;
  }
  torch::nn::Embedding embedding;
  std::vector<torch::nn::Linear> blocks;
  at::Tensor norm, head, unused;
};
TORCH_MODULE(LanguageModel);

LanguageModel make_model() {
  torch::manual_seed(3);
  return LanguageModel();
}

struct Use {
  bool with_head = true;
  bool tied = false;
};

at::Tensor loss_of(LanguageModel& model, int step, int rank, const Use& use) {
  const auto tokens = (torch::arange(8) * (rank + 3) + step).remainder(kTokens);
  return model->forward(tokens, use.with_head, use.tied).square().mean();
}

class LargeParameters : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override { fsdp::engine::set_reduced_alone(0); }
  void TearDown() override { fsdp::engine::set_reduced_alone(std::int64_t{8} << 20); }
};

std::vector<std::pair<std::string, FullyShardOptions>> variants(int ranks) {
  std::vector<std::pair<std::string, FullyShardOptions>> all;
  for (const auto* strategy : {"no_shard", "optim", "optim_grads", "optim_grads_params"}) {
    all.emplace_back(strategy, FullyShardOptions{.mesh = line(), .placements = Placements::from_name(strategy)});
  }
  all.emplace_back("offload", FullyShardOptions{.mesh = line(), .offload = fsdp::Offload::kAll});
  all.emplace_back("report of NaN", FullyShardOptions{.mesh = line(), .report_nan_in_param_grad = true});
  all.emplace_back("bf16", FullyShardOptions{.mesh = line(), .mixed_precision = fsdp::MixedPrecisionPolicy{.param_dtype = at::kBFloat16}});
  if (ranks == 4) {
    all.emplace_back("HSDP", FullyShardOptions{.mesh = plane()});
    all.emplace_back("HFSDP", FullyShardOptions{.mesh = plane(), .outer_placements = Placements::optim()});
  }
  return all;
}

// Values, against the same model that is reduced as a whole: the same sums, to the last bit. Ranks differ in what they use, and what they
// use changes, so that predictions are wrong. Some backwards are added up before they are reduced.
TEST_P(LargeParameters, HaveTheSameGradients) {
  run_ranks(GetParam(), [](int rank) {
    const auto use_of = [](int step, int rank) {
      if (step == 3) return Use{.with_head = rank != 0};  // One rank has no gradient of the head.
      if (step == 4) return Use{.with_head = false};      // None has.
      return Use{.tied = step >= 6};
    };
    for (auto& [name, options] : variants(GetParam())) {
      SCOPED_TRACE(name);
      options.units = fsdp::each<torch::nn::LinearImpl>();
      fsdp::engine::set_reduced_alone(std::int64_t{1} << 40);
      auto whole = make_model();
      auto reduced_whole = fsdp::fully_shard(*whole, options);
      fsdp::engine::set_reduced_alone(0);
      auto model = make_model();
      auto sharded = fsdp::fully_shard(*model, options);
      for (int step = 0; step < 9; ++step) {
        SCOPED_TRACE("step " + std::to_string(step));
        for (int backward = 0; backward < 2; ++backward) {
          const bool sync = backward == 1 || step % 3 != 2;
          std::vector<float> losses;
          for (auto* one : {&whole, &model}) {
            auto& handle = one == &model ? sharded : reduced_whole;
            fsdp::engine::set_reduced_alone(one == &model ? 0 : std::int64_t{1} << 40);
            handle.set_requires_gradient_sync(sync);
            auto loss = loss_of(*one, 2 * step + backward, rank, use_of(step, rank));
            losses.push_back(loss.item<float>());
            loss.backward();
          }
          EXPECT_EQ(losses[0], losses[1]);
        }
        const auto expected = reduced_whole.full_gradients();
        const auto found = sharded.full_gradients();
        ASSERT_EQ(expected.size(), found.size());
        for (std::size_t i = 0; i < found.size(); ++i) {
          ASSERT_EQ(found[i].first, expected[i].first);
          ASSERT_EQ(found[i].second.defined(), expected[i].second.defined()) << found[i].first;
          if (!found[i].second.defined()) continue;
          EXPECT_TRUE(found[i].second.equal(expected[i].second)) << found[i].first;
        }
        for (auto* handle : {&sharded, &reduced_whole}) handle->zero_grad();
        EXPECT_EQ(sharded.memory_stats().unreduced_gradients.live, 0);
      }
    }
  });
}

// No rank has a gradient of a large parameter: its part of the main gradients is zero, and does not hold what its memory held before.
TEST_P(LargeParameters, WithoutGradientsAreZeroInNorms) {
  run_ranks(GetParam(), [](int rank) {
    auto model = make_model();
    auto sharded = fsdp::fully_shard(*model, {.mesh = line(), .units = fsdp::each<torch::nn::LinearImpl>()});
    auto reference = make_model();
    for (int step = 0; step < 3; ++step) {
      const Use use{.with_head = step == 0};
      loss_of(model, step, 0, use).backward();
      loss_of(reference, step, 0, use).backward();
      const auto expected = torch::nn::utils::clip_grad_norm_(reference->parameters(), 1e9);
      EXPECT_NEAR(fsdp::clip_grad_norm(*model, 1e9), expected, 1e-5 * expected) << step;
      sharded.zero_grad();
      reference->zero_grad();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, LargeParameters, ::testing::Values(1, 2, 4), [](const auto& info) { return std::to_string(info.param); });

class LargeParametersOrder : public ::testing::Test {
 protected:
  void SetUp() override { fsdp::engine::set_reduced_alone(0); }
  void TearDown() override { fsdp::engine::set_reduced_alone(std::int64_t{8} << 20); }
};

// The head is reduced before the first block's gradients are, from the second backward on; the embedding at the end.
TEST_F(LargeParametersOrder, TheHeadIsReducedFirst) {
  const auto log = std::make_shared<Log>();
  const auto mesh = fsdp::testing::recorded(fsdp::null_device_mesh({{"dp_shard", 4}}), log);
  auto model = make_model();
  auto sharded = fsdp::fully_shard(*model, {.mesh = mesh, .units = fsdp::each<torch::nn::LinearImpl>()});
  const auto reductions = [&](int step, const Use& use) {
    sharded.zero_grad();
    log->clear();
    loss_of(model, step, 0, use).backward();
    Log found;
    for (const auto& event : *log) {
      if (event.starts_with("reduce ")) found.push_back(event);
    }
    return found;
  };
  const auto with = [&](std::size_t before, std::size_t after) {
    Log all(before, "reduce (root)");
    for (const auto* block : {"reduce block2", "reduce block1"}) all.emplace_back(block);
    all.insert(all.end(), after, "reduce (root)");
    all.emplace_back("reduce block0");
    return all;
  };
  EXPECT_EQ(reductions(0, {}), with(0, 3));  // Norm, head and embedding: nothing is predicted yet.
  EXPECT_EQ(reductions(1, {}), with(2, 1));
  const auto gathers = std::count_if(log->begin(), log->end(), [](const auto& event) { return event == "gather (root)"; });
  EXPECT_LE(gathers, 1);  // The unit is still one gather.
  EXPECT_EQ(reductions(2, {}), with(2, 1));
  EXPECT_EQ(reductions(3, {.tied = true}), with(2, 1));  // The head's reduction is in vain.
}

// While backward is in the blocks, no memory is held for the embedding's gradient, and none for the head's.
TEST_F(LargeParametersOrder, MemoryOfTheHeadIsFreed) {
  auto model = make_model();
  auto sharded =
      fsdp::fully_shard(*model, {.mesh = fsdp::null_device_mesh({{"dp_shard", 4}}), .units = fsdp::each<torch::nn::LinearImpl>()});
  std::vector<std::int64_t> live;
  for (int step = 0; step < 2; ++step) {
    sharded.zero_grad();
    auto x = model->embedding(torch::arange(8));
    for (std::size_t k = 0; k < model->blocks.size(); ++k) {
      x = torch::tanh(model->blocks[k](x));
      // The last block's gradients have been reduced when backward comes to the input of the one before.
      if (k == 0) x.register_hook([&](const at::Tensor&) { live.push_back(sharded.memory_stats().unreduced_gradients.live); });
    }
    torch::linear(x * model->norm, model->head).square().mean().backward();
  }
  ASSERT_EQ(live.size(), 2U);
  EXPECT_GE(live[0] - live[1], kTokens * kWidth * 4);
}

}  // namespace large_parameters_test
