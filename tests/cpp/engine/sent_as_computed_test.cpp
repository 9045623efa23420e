// [Sent as computed] Gradients that autograd makes in bf16 and that arrive once travel in bf16, although reductions are in fp32. Values are
// small integers, so that every sum is exact, in whatever order and dtype.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/activation_checkpoint.h"
#include "fsdp/fsdp.h"
#include "support/meshes.h"
#include "support/multi_rank.h"

namespace sent_as_computed_test {

using fsdp::testing::line;
using fsdp::testing::run_ranks;

constexpr std::int64_t kWidth = 32;

/// For each rank how often it uses the shared layer. Each use is checkpointed, so that backward delivers a gradient for each.
using Uses = std::vector<int>;

struct SharedImpl : torch::nn::Module {
  SharedImpl() {
    for (const auto* name : {"first", "shared", "last"}) {
      layers.push_back(register_module(name, torch::nn::Linear(torch::nn::LinearOptions(kWidth, kWidth).bias(false))));
    }
    const torch::NoGradGuard no_grad;
    // Permutations with signs keep values as small as they are.
    for (std::size_t k = 0; k < layers.size(); ++k) {
      const auto order = (torch::arange(kWidth) * 5 + static_cast<std::int64_t>(k)).remainder(kWidth);
      layers[k]->weight.copy_(torch::eye(kWidth).index_select(0, order) * (k == 1 ? -1 : 1));
    }
  }
  at::Tensor forward(at::Tensor x, int uses) {
    x = layers[0](x);
    for (int use = 0; use < uses; ++use) {
      x = fsdp::activation_checkpoint([this](const at::Tensor& input) { return layers[1]->forward(input); }, x);
    }
    return layers[2](detaches ? x.detach() : x);
  }
  bool detaches = false;  ///< Only the last layer gets a gradient.
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Shared);

at::Tensor loss_of(Shared& model, int step, int rank, int uses) {
  const auto x = (torch::arange(2 * kWidth) * (rank + 2) + step).remainder(5).sub(2).view({2, kWidth});
  // It needs a gradient, so that backward enters the first layer, too, and departs from the shared one.
  return model->forward(x.to(model->layers[0]->weight.scalar_type()).requires_grad_(), uses).sum();
}

fsdp::FSDPModule shard(Shared& model, const fsdp::DeviceMesh& mesh, fsdp::FullyShardOptions options = {}) {
  options.mesh = mesh;
  options.units = fsdp::each<torch::nn::LinearImpl>();
  options.mixed_precision = fsdp::MixedPrecisionPolicy{.param_dtype = at::kBFloat16};
  return fsdp::fully_shard(*model, std::move(options));
}

/// The gradients of all ranks in one process, on average.
std::vector<at::Tensor> expected_gradients(int step, const Uses& uses) {
  Shared whole;
  const auto ranks = static_cast<int>(uses.size());
  for (int rank = 0; rank < ranks; ++rank) loss_of(whole, step, rank, uses[static_cast<std::size_t>(rank)]).div(ranks).backward();
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : whole->parameters()) gradients.push_back(parameter.grad());
  return gradients;
}

void expect_gradients(fsdp::FSDPModule& sharded, const std::vector<at::Tensor>& expected) {
  const auto found = sharded.full_gradients();
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(found[i].second.equal(expected[i])) << found[i].first;
}

class SentAsComputed : public ::testing::TestWithParam<int> {
 protected:
  static int ranks() { return GetParam(); }
  /// The bytes that a rank sends of one unit's gradients in this dtype.
  static std::int64_t bytes(at::ScalarType dtype) {
    return (ranks() - 1) * kWidth * kWidth / ranks() * static_cast<std::int64_t>(c10::elementSize(dtype));
  }
  static Uses uses(int all) { return Uses(static_cast<std::size_t>(ranks()), all); }
  static Uses uses_of_rank_0(int count) {
    auto of_all = uses(1);
    of_all.front() = count;
    return of_all;
  }

  struct Step {
    Uses uses;
    std::int64_t bytes;
  };
  /// One backward for each step, all ranks at once: gradients, and bytes of reductions.
  static void expect_steps(const std::vector<Step>& steps) {
    run_ranks(ranks(), [&](int rank) {
      Shared model;
      auto sharded = shard(model, line());
      for (std::size_t k = 0; k < steps.size(); ++k) {
        SCOPED_TRACE("step " + std::to_string(k));
        sharded.reset_wire_stats();
        const auto step = static_cast<int>(k);
        loss_of(model, step, rank, steps[k].uses[static_cast<std::size_t>(rank)]).backward();
        EXPECT_EQ(sharded.wire_stats().reduce_scatter_bytes, steps[k].bytes);
        expect_gradients(sharded, expected_gradients(step, steps[k].uses));
        sharded.zero_grad();
        EXPECT_EQ(sharded.memory_stats().unreduced_gradients.live, 0);
        EXPECT_EQ(sharded.memory_stats().communication.live, 0);
      }
    });
  }
};

TEST_P(SentAsComputed, GradientsThatArriveOnceTakeHalfTheBytes) {
  const auto sent = 3 * bytes(at::kBFloat16);
  expect_steps({{uses(1), sent}, {uses(1), sent}});
}

// Nothing is decided when the second gradient comes: the ranks agree to convert, also where only one of them has it.
TEST_P(SentAsComputed, TheFirstReductionFindsThatGradientsArriveTwice) {
  const auto sent = 2 * bytes(at::kBFloat16) + bytes(at::kFloat);
  expect_steps({{uses(2), sent}, {uses(2), sent}, {uses(1), sent}});
  expect_steps({{uses_of_rank_0(2), sent}, {uses(1), sent}});
}

// It is decided: the second gradient is reduced at the end of backward, and the ranks convert from then on.
TEST_P(SentAsComputed, ASecondGradientThatNobodyExpectsIsNotLost) {
  const auto once = 3 * bytes(at::kBFloat16), twice = 2 * bytes(at::kBFloat16) + bytes(at::kFloat);
  expect_steps({{uses(1), once}, {uses(2), once + bytes(at::kFloat)}, {uses(2), twice}, {uses(1), twice}});
  expect_steps({{uses(1), once}, {uses_of_rank_0(3), once + bytes(at::kFloat)}, {uses_of_rank_0(2), twice}});
}

// Gradients that backwards without synchronization have added up are sent in the wire's dtype. The next ones are not.
TEST_P(SentAsComputed, WhatHasBeenAddedUpIsSentInTheDtypeOfTheWire) {
  run_ranks(ranks(), [&](int rank) {
    Shared model;
    auto sharded = shard(model, line());
    for (int step = 0; step < 4; ++step) {
      SCOPED_TRACE("step " + std::to_string(step));
      const bool adds_up = step % 2 == 0;
      auto expected = expected_gradients(step, uses(1));
      sharded.reset_wire_stats();
      if (adds_up) {
        sharded.set_requires_gradient_sync(false);
        loss_of(model, step, rank, 1).backward();
        sharded.set_requires_gradient_sync(true);
        for (auto& gradient : expected) gradient = gradient * 2;
      }
      loss_of(model, step, rank, 1).backward();
      EXPECT_EQ(sharded.wire_stats().reduce_scatter_bytes, 3 * bytes(adds_up ? at::kFloat : at::kBFloat16));
      expect_gradients(sharded, expected);
      sharded.zero_grad();
    }
  });
}

// Nor does a rank that had no gradient to add up send anything else.
TEST_P(SentAsComputed, ARankWithoutGradientsInTheSumSendsTheDtypeOfTheWireToo) {
  run_ranks(ranks(), [&](int rank) {
    Shared whole, model;
    auto sharded = shard(model, line(), {.reshard_after_forward = false});
    sharded.reset_wire_stats();
    for (const bool sync : {false, true}) {
      for (int r = 0; r < ranks(); ++r) {
        whole->detaches = !sync && r == 0;
        loss_of(whole, sync, r, 1).div(ranks()).backward();
      }
      model->detaches = !sync && rank == 0;
      sharded.set_requires_gradient_sync(sync);
      loss_of(model, sync, rank, 1).backward();
    }
    EXPECT_EQ(sharded.wire_stats().reduce_scatter_bytes, 3 * bytes(at::kFloat));
    std::vector<at::Tensor> expected;
    for (const auto& parameter : whole->parameters()) expected.push_back(parameter.grad());
    expect_gradients(sharded, expected);
  });
}

// Gradients that are dropped leave nothing behind that only some ranks know of.
TEST_P(SentAsComputed, DroppedGradientsAreForgotten) {
  run_ranks(ranks(), [&](int rank) {
    Shared model;
    auto sharded = shard(model, line());
    sharded.set_requires_gradient_sync(false);
    loss_of(model, 0, rank, 1).backward();
    sharded.zero_grad();
    sharded.set_requires_gradient_sync(true);
    sharded.reset_wire_stats();
    loss_of(model, 1, rank, 1).backward();
    EXPECT_EQ(sharded.wire_stats().reduce_scatter_bytes, 3 * bytes(at::kBFloat16));
    expect_gradients(sharded, expected_gradients(1, uses(1)));
  });
}

// Unreduced gradients and what is received of them.
TEST_P(SentAsComputed, MemoryIsHalf) {
  run_ranks(ranks(), [&](int rank) {
    std::vector<std::int64_t> peaks;
    for (const char* wanted : {"1", "0"}) {
      setenv("FSDP_SEND_AS_COMPUTED", wanted, 1);
      Shared model;
      auto sharded = shard(model, line());
      unsetenv("FSDP_SEND_AS_COMPUTED");
      loss_of(model, 0, rank, 1).backward();
      peaks.push_back(sharded.memory_stats().unreduced_gradients.peak);
      expect_gradients(sharded, expected_gradients(0, uses(1)));
      sharded.reset_wire_stats();
      loss_of(model, 1, rank, 1).backward();
      EXPECT_EQ(sharded.wire_stats().reduce_scatter_bytes, 3 * bytes(*wanted == '1' ? at::kBFloat16 : at::kFloat));
    }
    EXPECT_EQ(2 * peaks[0], peaks[1]);
  });
}

// One rank that keeps the wire's dtype decides for all.
TEST_P(SentAsComputed, OneRankMayTurnItOff) {
  run_ranks(ranks(), [&](int rank) {
    if (rank == 0) setenv("FSDP_SEND_AS_COMPUTED", "0", 1);
    Shared model;
    auto sharded = shard(model, line());
    unsetenv("FSDP_SEND_AS_COMPUTED");
    for (int step = 0; step < 2; ++step) {
      sharded.reset_wire_stats();
      loss_of(model, step, rank, 1).backward();
      EXPECT_EQ(sharded.wire_stats().reduce_scatter_bytes, 3 * bytes(at::kFloat));
      expect_gradients(sharded, expected_gradients(step, uses(1)));
      sharded.zero_grad();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, SentAsComputed, ::testing::Values(2, 4), [](const auto& info) { return std::to_string(info.param); });

}  // namespace sent_as_computed_test
