// What a wrapped optimizer leaves behind when its step throws.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "fsdp/fsdp.h"
#include "support/collected_warnings.h"
#include "support/meshes.h"
#include "support/twins.h"

namespace fsdp {
namespace wrap_failure_test {

using testing::batch;
using testing::make_net;
using testing::message_of;

/// Refuses its first step.
struct ReluctantSGD : torch::optim::SGD {
  using SGD::SGD;
  at::Tensor step(LossClosure closure = nullptr) override {
    if (std::exchange(is_first, false)) throw std::runtime_error("not yet");
    return SGD::step(closure);
  }
  bool is_first = true;
};

TEST(Wrap, AStepThatFailsLeavesNoGradients) {
  testing::run_ranks(2, [](int rank) {
    const auto model = make_net();
    auto sharded = fully_shard(*model, {.units = testing::each_linear()});
    auto optimizer = wrap(*model, [](auto p) { return std::make_unique<ReluctantSGD>(p, torch::optim::SGDOptions(0.1)); });
    model->forward(batch(rank)).sum().backward();
    EXPECT_EQ(message_of<std::exception>([&] { optimizer.step(); }), "not yet");
    optimizer.zero_grad();
    // Only the last layer gets a gradient now: the others' memory has gone.
    model->third(testing::normal({4, 10}, 7)).sum().backward();
    const auto before = sharded.full_parameters();
    optimizer.step();
    const auto after = sharded.full_parameters();
    for (std::size_t i = 0; i < before.size(); ++i) {
      EXPECT_EQ(torch::equal(before[i].second, after[i].second), !before[i].first.starts_with("third")) << before[i].first;
    }
  });
}

/// Throws when it has updated all.
struct LateSGD : torch::optim::SGD {
  using SGD::SGD;
  at::Tensor step(LossClosure closure = nullptr) override {
    SGD::step(closure);
    throw std::runtime_error("too late");
  }
};

TEST(Wrap, AStepThatFailsLateLeavesNoOldCopies) {
  testing::run_ranks(2, [](int rank) {
    for (const auto& strategy : testing::all_strategies()) {
      const auto model = make_net();
      auto sharded = fully_shard(*model, {.units = testing::each_linear(), .placements = Placements::from_name(strategy)});
      sharded.set_reshard_after_backward(false);
      auto optimizer = wrap(*model, [](auto p) { return std::make_unique<LateSGD>(p, torch::optim::SGDOptions(0.1)); });
      model->forward(batch(rank)).sum().backward();
      const auto before = model->third->weight.detach().clone();
      EXPECT_EQ(message_of<std::exception>([&] { optimizer.step(); }), "too late");
      const auto main = sharded.full_parameters();
      EXPECT_TRUE(torch::equal(model->third->weight, main[4].second)) << strategy << ", " << main[4].first;
      EXPECT_FALSE(torch::equal(model->third->weight, before)) << strategy;
    }
  });
}

/// Throws for a reason of its own when its peers have gone.
struct LonelySGD : torch::optim::SGD {
  using SGD::SGD;
  at::Tensor step(LossClosure closure = nullptr) override {
    SGD::step(closure);
    EXPECT_NE(message_of<CommError>([&] { meet_peers(); }), "");
    throw std::runtime_error("no state");
  }
  std::function<void()> meet_peers;
};

TEST(Wrap, AStepThatFailsSaysWhyThoughItsPeersAreGone) {
  testing::run_ranks(2, [](int rank) {
    const auto model = make_net();
    auto sharded = fully_shard(*model, {.mesh = testing::plane(), .outer_placements = Placements::optim()});
    auto optimizer = wrap(*model, [&](auto p) {
      auto lonely = std::make_unique<LonelySGD>(p, torch::optim::SGDOptions(0.1));
      lonely->meet_peers = [&] { sharded.full_parameters(); };
      return lonely;
    });
    model->forward(batch(rank)).sum().backward();
    if (rank == 1) return;
    const testing::CollectedWarnings warnings;
    EXPECT_EQ(message_of<std::exception>([&] { optimizer.step(); }), "no state");
    EXPECT_NE(warnings.text().find("this failed, too"), std::string::npos) << warnings.text();
    // What is tried next fails, too.
    EXPECT_NE(message_of<CommError>([&] { model->forward(batch(rank)); }), "");
  });
}

}  // namespace wrap_failure_test
}  // namespace fsdp
