// What a program does in vain is said once per model, and only then.

#include "paging/warnings.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "fsdp/fsdp.h"
#include "support/twins.h"

namespace fsdp {
namespace warnings_test {

using testing::batch;
using testing::each_linear;
using testing::has;
using testing::line;
using testing::make_net;
using testing::Net;

/// Keeps this library's warnings.
class Warnings final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override {
    if (has(warning.msg(), "fsdp: ")) texts.push_back(warning.msg());
  }
  std::vector<std::string> texts;

 private:
  c10::WarningUtils::WarningHandlerGuard guard_{this};
};

void backward(Net& net, int rank) { net.forward(batch(rank)).square().mean().backward(); }

struct Model {
  Model() : net(make_net()), handle(fully_shard(*net, {.mesh = line(), .units = each_linear()})) {}
  std::shared_ptr<Net> net;
  FSDPModule handle;
};

TEST(Warnings, OptimizersOfTorch) {
  testing::run_ranks(2, [](int rank) {
    Warnings warnings;
    const Model model;
    torch::optim::SGD optimizer(model.net->parameters(), torch::optim::SGDOptions(0.1));
    optimizer.zero_grad();
    EXPECT_EQ(warnings.texts.size(), 0U);  // There is no gradient yet.
    for (int step = 0; step < 3; ++step) {
      backward(*model.net, rank);
      optimizer.step();
      optimizer.zero_grad();
    }
    ASSERT_EQ(warnings.texts.size(), 1U);
    EXPECT_TRUE(has(warnings.texts[0], "'first.weight'") && has(warnings.texts[0], "fsdp::AdamW") && has(warnings.texts[0], "fsdp::wrap"));

    const Model other;
    backward(*other.net, rank);
    optimizer.step();
    EXPECT_EQ(warnings.texts.size(), 1U);
    torch::optim::AdamW(other.net->parameters(), torch::optim::AdamWOptions(0.1)).step();
    EXPECT_EQ(warnings.texts.size(), 2U);
  });
}

TEST(Warnings, ClippingAndZeroGradOfTorch) {
  testing::run_ranks(2, [](int rank) {
    Warnings warnings;
    const Model clipped;
    backward(*clipped.net, rank);
    EXPECT_EQ(torch::nn::utils::clip_grad_norm_(clipped.net->parameters(), 1.0), 0);
    EXPECT_EQ(warnings.texts.size(), 1U);
    const Model zeroed;
    backward(*zeroed.net, rank);
    zeroed.net->zero_grad();
    ASSERT_EQ(warnings.texts.size(), 2U);
    EXPECT_TRUE(has(warnings.texts[1], "fsdp::clip_grad_norm") && has(warnings.texts[1], "zero_grad()"));
  });
}

TEST(Warnings, NoneInOrdinaryTraining) {
  testing::run_ranks(2, [](int rank) {
    Warnings warnings;
    Model model;
    AdamW optimizer(*model.net, {.lr = 0.1});
    for (int step = 0; step < 3; ++step) {
      for (int micro = 0; micro < 4; ++micro) backward(*model.net, rank);  // reduces each time
      clip_grad_norm(*model.net, 1.0);
      optimizer.step();
      optimizer.zero_grad();
      model.net->zero_grad();  // needless, and harmless
    }
    for (int micro = 0; micro < 4; ++micro) {
      model.handle.set_requires_gradient_sync(micro == 3);
      backward(*model.net, rank);
    }
    model.handle.gradient_shards();
    model.handle.zero_grad();
    fully_unshard(*model.net);
    backward(*model.net, rank);
    model.net->zero_grad();
    EXPECT_EQ(warnings.texts, std::vector<std::string>());
  });
}

TEST(Warnings, ParametersWithoutAGradient) {
  testing::run_ranks(2, [](int rank) {
    const auto partial = [rank](Net& net) { net.third(at::ones({2, 10})).sum().backward(); };
    Warnings warnings;
    {
      Model model;
      {
        const NoSync no_sync(*model.net);
        partial(*model.net);
      }
      torch::autograd::backward({model.net->forward(batch(rank)).sum()}, {}, {}, false, {model.net->third->bias});
      torch::autograd::grad({model.net->forward(batch(rank)).sum()}, {model.net->third->bias});
      model.handle.zero_grad();
      EXPECT_EQ(warnings.texts.size(), 0U);
      model.net->first->bias.set_requires_grad(false);
      for (int pass = 0; pass < 2; ++pass) partial(*model.net);
    }
    ASSERT_EQ(warnings.texts.size(), rank == 0 ? 1U : 0U);
    if (rank == 0) {
      for (const auto* name : {"'first.weight'", "'second.weight'", "'second.bias'"}) EXPECT_TRUE(has(warnings.texts[0], name)) << name;
      for (const auto* name : {"'first.bias'", "'third"}) EXPECT_FALSE(has(warnings.texts[0], name)) << name;
      EXPECT_TRUE(has(warnings.texts[0], "fsdp::tie_parameters"));
    }
    warnings.texts.clear();

    // One rank's gradient is enough; and what came in the first backward is not asked for in the next.
    Model model;
    auto x = batch(rank).matmul(model.net->first->weight.t());
    if (rank == 1) x = x + model.net->first->bias;
    model.net->third(model.net->second(x)).sum().backward();
    model.handle.zero_grad();
    partial(*model.net);
    EXPECT_EQ(warnings.texts, std::vector<std::string>());
  });
}

}  // namespace warnings_test
}  // namespace fsdp
