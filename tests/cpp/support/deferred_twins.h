#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <set>
#include <string>
#include <utility>

#include "fsdp/fsdp.h"
#include "support/twins.h"

// Models built whole, and their twins built without memory.
namespace fsdp::testing {

inline torch::nn::Module& module_of(torch::nn::Module& module) { return module; }
template <typename Holder>
torch::nn::Module& module_of(Holder& holder) {
  return *holder;
}

/// Each parameter once, under its first name, as the handle gives them.
inline NamedTensors parameters_of(const torch::nn::Module& module) {
  NamedTensors values;
  std::set<const c10::TensorImpl*> seen;
  for (const auto& item : module.named_parameters()) {
    if (seen.insert(item.value().unsafeGetTensorImpl()).second) values.emplace_back(item.key(), item.value().detach().clone());
  }
  return values;
}

inline NamedTensors buffers_of(const torch::nn::Module& module) {
  NamedTensors buffers;
  for (const auto& item : module.named_buffers()) buffers.emplace_back(item.key(), item.value());
  return buffers;
}

/// What `make` gives with the seed of this test, and the random numbers that follow.
template <typename Make>
auto with_seed(const Make& make) {
  torch::manual_seed(5);
  auto model = make();
  return std::pair(std::move(model), at::rand({3}));
}

/// Built without memory, then made whole: as built whole.
template <typename Make>
void expect_materialized_like_eager(const Make& make, bool all_deferred = true) {
  auto [plain, numbers] = with_seed(make);
  auto [model, same_numbers] = with_seed([&] { return deferred_init(make); });
  EXPECT_TRUE(torch::equal(numbers, same_numbers)) << "what follows draws other numbers";
  if (all_deferred) {
    for (const auto& parameter : module_of(model).parameters()) EXPECT_TRUE(is_deferred(parameter) && parameter.is_meta());
  }
  const auto state = at::detail::getDefaultCPUGenerator().get_state();
  materialize(module_of(model));
  EXPECT_TRUE(torch::equal(at::detail::getDefaultCPUGenerator().get_state(), state)) << "materialize draws";
  for (const auto& parameter : module_of(model).parameters()) EXPECT_FALSE(is_deferred(parameter));
  expect_same(values_of(module_of(model)), values_of(module_of(plain)), 0, "materialized");
  expect_same(buffers_of(module_of(model)), buffers_of(module_of(plain)), 0, "materialized buffers");
  const auto expected = module_of(plain).parameters();
  const auto actual = module_of(model).parameters();
  for (std::size_t i = 0; i < actual.size(); ++i) {
    EXPECT_EQ(actual[i].requires_grad(), expected[i].requires_grad());
    EXPECT_EQ(actual[i].is_leaf(), expected[i].is_leaf());
    EXPECT_EQ(actual[i].strides(), expected[i].strides());
  }
}

/// Built without memory, then sharded with every strategy: the values of the model built whole. `run(module, rank)` gives what training
/// would look at.
template <typename Make, typename Run>
void expect_sharded_like_eager(const Make& make, const UnitPredicate& units, const Run& run) {
  over_ranks([&](int rank) {
    const auto mesh = line();
    for (const auto& strategy : all_strategies()) {
      const FullyShardOptions options{.mesh = mesh, .units = units, .placements = Placements::from_name(strategy)};
      auto [plain, numbers] = with_seed(make);
      auto [model, same_numbers] = with_seed([&] { return deferred_init(make); });
      EXPECT_TRUE(torch::equal(numbers, same_numbers));
      const auto parameters = module_of(model).parameters();
      for (const auto& parameter : parameters) EXPECT_TRUE(is_deferred(parameter)) << strategy;
      const auto expected = parameters_of(module_of(plain));
      const auto before = fully_shard(module_of(plain), options);
      auto sharded = fully_shard(module_of(model), options);
      for (const auto& parameter : parameters) EXPECT_FALSE(is_deferred(parameter)) << strategy;
      expect_same(sharded.full_parameters(), expected, 0, strategy);
      expect_same(buffers_of(module_of(model)), buffers_of(module_of(plain)), 0, strategy + ", buffers");
      const at::Tensor result = run(model, rank);
      EXPECT_TRUE(torch::equal(result, run(plain, rank))) << strategy;
      expect_same(sharded.full_gradients(), before.full_gradients(), 0, strategy + ", gradients");
      expect_same(buffers_of(module_of(model)), buffers_of(module_of(plain)), 0, strategy + ", buffers after a step");
    }
  });
}

}  // namespace fsdp::testing
