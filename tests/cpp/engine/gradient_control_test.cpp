// When and how gradients are reduced: synchronization by unit and by dimension, divide factors, reductions that go on into the next
// forward, process groups, experts, and what stays gathered.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <string>
#include <vector>

#include "fsdp/error.h"
#include "support/multi_rank.h"
#include "support/same_bits.h"
#include "support/stack.h"

namespace gradient_control_test {

using fsdp::FullyShardOptions;
using fsdp::Placements;
using fsdp::testing::expect_same_bits;
using fsdp::testing::line;
using fsdp::testing::make_stack;
using fsdp::testing::NamedTensors;
using fsdp::testing::plane;
using fsdp::testing::run_ranks;
using fsdp::testing::same_bits;
using fsdp::testing::Stack;
using fsdp::testing::stack_input;
using fsdp::testing::stack_loss;
using fsdp::testing::stack_units;

/// Gradients of `backwards` backwards on this rank's inputs, averaged over ranks, of the unsharded model.
NamedTensors reference(int ranks, int backwards) {
  auto model = make_stack();
  for (int backward = 0; backward < backwards; ++backward) {
    for (int rank = 0; rank < ranks; ++rank) stack_loss(model, backward, rank).div(ranks).backward();
  }
  NamedTensors gradients;
  for (const auto& item : model->named_parameters()) gradients.emplace_back(item.key(), item.value().grad());
  return gradients;
}

void expect_close(const NamedTensors& a, const NamedTensors& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    ASSERT_TRUE(a[i].second.defined()) << a[i].first;
    EXPECT_TRUE(torch::allclose(a[i].second, b[i].second, 1e-4, 1e-6)) << a[i].first;
  }
}

TEST(GradientControl, NoSyncRestoresWhatItFound) {
  run_ranks(2, [](int rank) {
    auto model = make_stack();
    auto sharded = fsdp::fully_shard(*model, {.mesh = line(), .units = stack_units()});
    {
      const fsdp::NoSync no_sync(*model);
      stack_loss(model, 0, rank).backward();
      for (const auto& [name, gradient] : sharded.full_gradients()) EXPECT_FALSE(gradient.defined()) << name;
    }
    stack_loss(model, 1, rank).backward();
    expect_close(sharded.full_gradients(), reference(2, 2));
    // What was off stays off.
    sharded.zero_grad();
    sharded.set_requires_gradient_sync(false);
    { const fsdp::NoSync no_sync(*model); }
    stack_loss(model, 0, rank).backward();
    for (const auto& [name, gradient] : sharded.full_gradients()) EXPECT_FALSE(gradient.defined()) << name;
  });
}

TEST(GradientControl, OfOneUnit) {
  run_ranks(2, [](int rank) {
    auto model = make_stack();
    auto sharded = fsdp::fully_shard(*model, {.mesh = line(), .units = stack_units()});
    fsdp::handle(*model->blocks->ptr(1)).set_requires_gradient_sync(false);
    stack_loss(model, 0, rank).backward();
    for (const auto& [name, gradient] : sharded.full_gradients()) EXPECT_EQ(gradient.defined(), !name.starts_with("blocks.1.")) << name;
    fsdp::handle(*model->blocks->ptr(1)).set_requires_gradient_sync(true);
    stack_loss(model, 1, rank).backward();
    expect_close(sharded.full_gradients(), reference(2, 2));
  });
}

// Small gradients travel as bytes, but not those whose bytes are not their values.
TEST(GradientControl, LazilyNegatedGradientsAreNegated) {
  run_ranks(2, [](int rank) {
    auto model = make_stack();
    auto sharded = fsdp::fully_shard(*model, {.mesh = line(), .units = stack_units()});
    stack_loss(model, 0, rank).backward();
    const auto expected = sharded.full_gradients();
    sharded.zero_grad();
    bool negative = false;
    for (const auto& parameter : model->parameters()) {
      parameter.register_hook([](const at::Tensor& gradient) { return at::_neg_view(-gradient); });
    }
    model->parameters().front().register_hook([&](const at::Tensor& gradient) { negative = gradient.is_neg(); });
    stack_loss(model, 0, rank).backward();
    EXPECT_TRUE(negative);
    expect_same_bits(sharded.full_gradients(), expected);
  });
}

// Partial sums stay on the inner dimension until the outer one is asked for.
TEST(GradientControl, RequiresAllReduce) {
  run_ranks(4, [](int rank) {
    const auto mesh = plane();
    for (const auto& outer : {Placements::no_shard(), Placements::optim()}) {
      for (const bool replicated : {false, true}) {
        if (replicated && outer == Placements::optim()) continue;
        auto model = make_stack();
        auto sharded = fsdp::fully_shard(*model, {.mesh = mesh,
                                                  .units = stack_units(),
                                                  .placements = replicated ? Placements::no_shard() : Placements::optim_grads_params(),
                                                  .outer_placements = outer});
        fsdp::AdamW optimizer(*model);
        for (int step = 0; step < 2; ++step) {
          sharded.set_requires_all_reduce(false);
          sharded.reset_wire_stats();
          stack_loss(model, 0, rank).backward();
          const auto partly = sharded.wire_stats();
          for (const auto& [name, gradient] : sharded.full_gradients()) EXPECT_FALSE(gradient.defined()) << name;
          stack_loss(model, 1, rank).backward();
          sharded.set_requires_all_reduce(true);
          sharded.reset_wire_stats();
          stack_loss(model, 2, rank).backward();
          const auto wholly = sharded.wire_stats();
          EXPECT_EQ(partly.reduce_scatters, 5);
          EXPECT_EQ(wholly.reduce_scatters, 10);
          expect_close(sharded.full_gradients(), reference(4, 3));
          optimizer.zero_grad();
          EXPECT_EQ(sharded.memory_stats().unreduced_gradients.live, 0);
          EXPECT_EQ(sharded.memory_stats().main_gradients.live, 0);
        }
      }
    }
  });
}

// Whether a reduction goes on over the outer dimension is decided when it begins, not when it is waited for.
TEST(GradientControl, RequiresAllReduceIsReadWhenAReductionBegins) {
  run_ranks(4, [](int rank) {
    auto model = make_stack();
    auto sharded = fsdp::fully_shard(*model, {.mesh = plane(), .units = stack_units()});
    sharded.set_is_last_backward(false);
    sharded.set_requires_all_reduce(false);
    sharded.reset_wire_stats();
    stack_loss(model, 0, rank).backward();
    sharded.set_requires_all_reduce(true);
    sharded.set_is_last_backward(true);
    stack_loss(model, 1, rank).backward();
    EXPECT_EQ(sharded.wire_stats().reduce_scatters, 5 + 10);
    expect_close(sharded.full_gradients(), reference(4, 2));
  });
}

// A unit without a gradient in the backward that reduces over the outer dimension still has what was added up before.
TEST(GradientControl, PartialSumsOfUnusedUnitsAreReduced) {
  run_ranks(4, [](int rank) {
    auto model = make_stack();
    auto sharded = fsdp::fully_shard(*model, {.mesh = plane(), .units = stack_units()});
    sharded.set_requires_all_reduce(false);
    stack_loss(model, 0, rank).backward();
    sharded.set_requires_all_reduce(true);
    stack_loss(model, 1, rank, {0, 2}).backward();
    auto whole = make_stack();
    for (int r = 0; r < 4; ++r) stack_loss(whole, 0, r).div(4).backward();
    for (int r = 0; r < 4; ++r) stack_loss(whole, 1, r, {0, 2}).div(4).backward();
    NamedTensors expected;
    for (const auto& item : whole->named_parameters()) expected.emplace_back(item.key(), item.value().grad());
    expect_close(sharded.full_gradients(), expected);
  });
}

TEST(GradientControl, DivideFactorAndScale) {
  run_ranks(2, [](int rank) {
    auto model = make_stack();
    auto sharded = fsdp::fully_shard(*model, {.mesh = line(), .units = stack_units()});
    sharded.set_gradient_divide_factor(1);
    stack_loss(model, 0, rank).backward();
    sharded.scale_gradients(0.5);  // 1 / a number that all ranks agreed on meanwhile
    const auto scaled = sharded.full_gradients();
    sharded.zero_grad();
    sharded.set_gradient_divide_factor(0);
    stack_loss(model, 0, rank).backward();
    expect_same_bits(scaled, sharded.full_gradients());
    EXPECT_THROW(sharded.set_gradient_divide_factor(-1), fsdp::Error);
  });
}

// Reductions that are under way when backward ends are part of the next step all the same.
TEST(GradientControl, NotTheLastBackward) {
  run_ranks(4, [](int rank) {
    const fsdp::MeshOptions messages{.shared_memory = false};  // which need staging
    for (const auto& mesh : {fsdp::init_device_mesh("cpu", {{"dp_shard", -1}}, messages),
                             fsdp::init_device_mesh("cpu", {{"dp_outer", 2}, {"dp_shard", -1}}, messages)}) {
      for (const auto& placements : {Placements::no_shard(), Placements::optim_grads_params()}) {
        NamedTensors results[2];
        for (const bool last : {true, false}) {
          auto model = make_stack();
          auto sharded = fsdp::fully_shard(*model, {.mesh = mesh, .units = stack_units(), .placements = placements});
          fsdp::AdamW optimizer(*model);
          for (int step = 0; step < 3; ++step) {
            sharded.set_is_last_backward(last);
            stack_loss(model, 2 * step, rank).backward();
            stack_loss(model, 2 * step + 1, rank).backward();
            EXPECT_EQ(sharded.memory_stats().communication.live > 0, !last) << "the staging of reductions that are under way";
            if (step == 0) sharded.finish_gradient_sync();
            if (step == 0) {
              EXPECT_EQ(sharded.memory_stats().communication.live, 0);
            }
            optimizer.step();
            optimizer.zero_grad();
          }
          results[last ? 0 : 1] = sharded.full_parameters();
        }
        expect_same_bits(results[0], results[1]);
      }
    }
  });
}

// The next forward throws; what the backward before it gave is whole, in every unit.
TEST(GradientControl, AResetEndsWhatIsUnderWay) {
  run_ranks(4, [](int rank) {
    for (const auto& mesh : {line(), plane()}) {
      for (const auto& placements : {Placements::no_shard(), Placements::optim_grads_params()}) {
        NamedTensors results[2];
        for (const bool last : {true, false}) {
          auto model = make_stack();
          auto sharded = fsdp::fully_shard(*model, {.mesh = mesh, .units = stack_units(), .placements = placements});
          stack_loss(model, 0, rank).backward();
          sharded.set_is_last_backward(last);
          stack_loss(model, 1, rank).backward();
          stack_loss(model, 2, rank);
          sharded.reset();
          sharded.set_is_last_backward(true);
          stack_loss(model, 3, rank).backward();
          results[last ? 0 : 1] = sharded.full_gradients();
        }
        expect_same_bits(results[0], results[1]);
      }
    }
  });
}

// What stays gathered, for how long and from whom, changes no bit.
TEST(GradientControl, ResidencyChangesNoBit) {
  run_ranks(4, [](int rank) {
    const auto mesh = line();
    std::vector<std::function<void(FullyShardOptions&)>> variants = {
        [](FullyShardOptions&) {},
        [](FullyShardOptions& options) { options.reshard_after_forward_size = 2; },
        [](FullyShardOptions& options) { options.separate_reduce_group = true; },
        [](FullyShardOptions& options) { options.prefetch_depth = 0; },
    };
    NamedTensors first;
    for (std::size_t v = 0; v < variants.size() + 3; ++v) {
      SCOPED_TRACE(v);
      auto model = make_stack();
      FullyShardOptions options{.mesh = mesh, .units = stack_units()};
      if (v < variants.size()) variants[v](options);
      auto sharded = fsdp::fully_shard(*model, options);
      const auto block = [&](std::size_t k) { return fsdp::handle(*model->blocks->ptr(k)); };
      if (v == variants.size()) sharded.set_reshard_after_backward(false);
      if (v == variants.size() + 1) {
        sharded.set_modules_to_forward_prefetch({block(0), block(1)});
        block(0).set_modules_to_forward_prefetch({block(1), block(2)});
        block(3).set_modules_to_backward_prefetch({block(2), block(1)});
      }
      fsdp::AdamW optimizer(*model);
      for (int step = 0; step < 3; ++step) {
        if (v == variants.size() + 2) {
          auto handle = block(2).unshard_async();
          if (step > 0) handle.wait();
        }
        stack_loss(model, step, rank).backward();
        {
          const torch::NoGradGuard no_grad;
          stack_loss(model, 50 + step, rank);
        }
        optimizer.step();
        optimizer.zero_grad();
      }
      const auto parameters = sharded.full_parameters();
      if (v == 0) first = parameters;
      expect_same_bits(parameters, first);
    }
  });
}

TEST(GradientControl, ReshardingToNeighboursGathersFromThemInBackward) {
  run_ranks(4, [](int rank) {
    const auto mesh = line();
    std::map<std::int64_t, std::int64_t> sent;
    std::map<std::int64_t, std::int64_t> kept;
    std::int64_t blocks = 0;
    for (const std::int64_t size : {0, 2}) {
      auto model = make_stack();
      auto sharded = fsdp::fully_shard(*model, {.mesh = mesh, .units = stack_units(), .reshard_after_forward_size = size});
      sharded.reset_wire_stats();
      const auto loss = stack_loss(model, 0, rank);
      kept[size] = sharded.memory_stats().gathered_parameters.live;
      loss.backward();
      sent[size] = sharded.wire_stats().all_gather_bytes;
      blocks = 0;
      for (const auto& [name, parameter] : sharded.full_parameters()) {
        if (name.starts_with("blocks.") && !name.starts_with("blocks.3")) blocks += (parameter.numel() + 15) / 16 * 16 * 4;
      }
      EXPECT_EQ(sharded.memory_stats().gathered_parameters.live, 0);
    }
    // Three blocks are gathered again: from one neighbour half of them, instead of a quarter from each of three. (Padding apart.)
    EXPECT_NEAR(static_cast<double>(kept[2] - kept[0]), static_cast<double>(blocks) / 2, 3 * 4 * 64);
    EXPECT_NEAR(static_cast<double>(sent[0] - sent[2]), static_cast<double>(blocks) * (0.75 - 0.5), 3 * 4 * 64);
  });
}

// Experts: block 1 has other values on the ranks of another row, and is averaged over its own ranks only.
TEST(GradientControl, ExpertsOnTheirOwnMesh) {
  run_ranks(4, [](int rank) {
    const auto mesh = line();
    const auto grid = fsdp::init_device_mesh("cpu", {{"expert", 2}, {"expert_data", 2}});
    auto model = make_stack();
    const auto expert = grid.coordinate("expert");
    {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : model->blocks->ptr(1)->parameters()) parameter.add_(0.01 * static_cast<double>(expert));
    }
    auto sharded = fsdp::fully_shard(
        *model, {.mesh = mesh, .units = stack_units(), .unit_settings = [&](const std::string& name, const torch::nn::Module&) {
                   fsdp::UnitSettings settings;
                   if (name == "blocks.1") settings = {.mesh = grid["expert_data"], .gradient_divide_factor = 4};
                   return settings;
                 }});
    stack_loss(model, 0, rank).backward();
    std::vector<Stack> replicas;
    for (int e = 0; e < 2; ++e) {
      replicas.push_back(make_stack());
      const torch::NoGradGuard no_grad;
      for (auto& parameter : replicas.back()->blocks->ptr(1)->parameters()) parameter.add_(0.01 * e);
    }
    for (int r = 0; r < 4; ++r) stack_loss(replicas[static_cast<std::size_t>(r / 2)], 0, r).div(4).backward();
    for (const auto& [name, gradient] : sharded.full_gradients()) {
      const auto of = [&, name = name](std::size_t e) { return replicas[e]->named_parameters()[name].grad(); };
      const auto expected = name.starts_with("blocks.1.") ? of(static_cast<std::size_t>(expert)) : of(0) + of(1);
      EXPECT_TRUE(torch::allclose(gradient, expected, 1e-4, 1e-6)) << name;
    }
    // The norm counts every element of every expert once.
    double squares = 0;
    for (const auto& item : replicas[0]->named_parameters()) {
      const auto other = replicas[1]->named_parameters()[item.key()].grad();
      if (item.key().starts_with("blocks.1.")) {
        squares += item.value().grad().square().sum().item<double>() + other.square().sum().item<double>();
      } else {
        squares += (item.value().grad() + other).square().sum().item<double>();
      }
    }
    EXPECT_NEAR(fsdp::clip_grad_norm(*model, 1e9), std::sqrt(squares), 1e-5);
  });
}

TEST(GradientControl, ForwardConvertsAtTheBoundary) {
  run_ranks(2, [](int rank) {
    auto model = make_stack();
    const fsdp::MixedPrecisionPolicy policy{.param_dtype = at::kBFloat16, .output_dtype = at::kFloat};
    auto sharded = fsdp::fully_shard(*model, {.mesh = line(), .units = stack_units(), .mixed_precision = policy});
    for (const auto& parameter : model->parameters()) EXPECT_EQ(parameter.scalar_type(), at::kBFloat16);
    const auto output = fsdp::forward(model, stack_input(0, rank), std::vector<std::size_t>{});
    EXPECT_EQ(output.scalar_type(), at::kFloat);
    output.square().mean().backward();
    for (const auto& shard : sharded.parameter_shards()) EXPECT_EQ(shard.value.scalar_type(), at::kFloat) << shard.name;
    for (const auto& shard : sharded.gradient_shards()) EXPECT_EQ(shard.value.scalar_type(), at::kFloat) << shard.name;
    fsdp::fully_unshard(*model);
    const auto original = make_stack();
    for (const auto& item : model->named_parameters())
      EXPECT_TRUE(same_bits(item.value(), original->named_parameters()[item.key()])) << item.key();
  });
}

// Writes of operators: where nothing changes, the main parameters keep the digits that the compute dtype does not have.
TEST(GradientControl, WritesInALowerPrecisionKeepOtherDigits) {
  run_ranks(2, [] {
    for (const auto& placements : {Placements::no_shard(), Placements::optim(), Placements::optim_grads_params()}) {
      auto model = make_stack();
      const auto before = make_stack();
      auto sharded = fsdp::fully_shard(*model, {.mesh = line(),
                                                .units = stack_units(),
                                                .placements = placements,
                                                .mixed_precision = fsdp::MixedPrecisionPolicy{.param_dtype = at::kBFloat16}});
      {
        const torch::NoGradGuard no_grad;
        model->head->weight.select(0, 1).fill_(2);
      }
      for (const auto& [name, value] : sharded.full_parameters()) {
        auto expected = before->named_parameters()[name].detach().clone();
        if (name == "head.weight") expected.select(0, 1).fill_(2);
        EXPECT_TRUE(same_bits(value, expected)) << name;
      }
    }
  });
}

}  // namespace gradient_control_test
