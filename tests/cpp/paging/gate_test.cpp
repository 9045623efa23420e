// Threads that use one model at the same time, on one rank: each finds what it needs.

#include "paging/gate.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <thread>
#include <vector>

#include "fsdp/fsdp.h"
#include "support/twins.h"

namespace fsdp {
namespace gate_test {

using testing::batch;
using testing::each_linear;
using testing::line;
using testing::make_net;
using testing::run_ranks;

/// Runs fn(k) on threads k = 0, 1, 2.
template <typename Fn>
void in_threads(const Fn& fn) {
  std::vector<std::thread> threads;
  for (int k = 0; k < 3; ++k) threads.emplace_back([&fn, k] { fn(k); });
  for (auto& thread : threads) thread.join();
}

TEST(Gate, ForwardsOfThreads) {
  run_ranks(1, [] {
    const auto plain = make_net();
    const auto model = make_net();
    const auto sharded = fully_shard(*model, {.mesh = line(), .units = each_linear()});
    in_threads([&](int k) {
      const torch::NoGradGuard no_grad;
      const auto expected = plain->forward(batch(k));
      for (int pass = 0; pass < 200; ++pass) ASSERT_TRUE(torch::equal(model->forward(batch(k)), expected)) << pass;
    });
  });
}

TEST(Gate, BackwardsOfThreads) {
  run_ranks(1, [] {
    const auto model = make_net();
    auto sharded = fully_shard(*model, {.mesh = line(), .units = each_linear()});
    in_threads([&](int k) {
      for (int pass = 0; pass < 50; ++pass) {
        const auto x = batch(k).requires_grad_();
        const auto weights = torch::autograd::grad({model->forward(x).square().sum()}, {x});
        ASSERT_TRUE(weights[0].isfinite().all().item<bool>());
      }
    });
    sharded.zero_grad();
    model->forward(batch(0)).sum().backward();
    EXPECT_TRUE(sharded.full_gradients().front().second.defined());
  });
}

}  // namespace gate_test
}  // namespace fsdp
