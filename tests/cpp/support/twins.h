#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/fsdp.h"
#include "support/meshes.h"
#include "support/messages.h"
#include "support/multi_rank.h"
#include "support/reference.h"

// A model and its sharded twin, and programs that must do the same to both.
namespace fsdp::testing {

/// `fn` on 1, 2 and 4 ranks.
template <typename Fn>
void over_ranks(const Fn& fn) {
  for (const int ranks : {1, 2, 4}) run_ranks(ranks, fn);
}

inline at::Tensor normal(at::IntArrayRef shape, std::uint64_t seed) {
  auto generator = at::detail::createCPUGenerator(seed);
  return at::randn(shape, generator);
}

/// Three layers of odd sizes, so that shards begin and end inside parameters.
struct Net : torch::nn::Module {
  Net()
      : first(register_module("first", torch::nn::Linear(6, 10))),
        second(register_module("second", torch::nn::Linear(10, 10))),
        third(register_module("third", torch::nn::Linear(10, 3))) {}

  at::Tensor forward(const at::Tensor& x) { return third(at::gelu(second(at::tanh(first(x))))); }

  torch::nn::Linear first, second, third;
};

/// This rank's part of the data.
inline at::Tensor batch(int rank) { return normal({4, 6}, 100 + static_cast<std::uint64_t>(rank)); }

inline UnitPredicate each_linear() { return each<torch::nn::LinearImpl>(); }

/// Equal seeds give equal models.
template <typename Make>
auto seeded(const Make& make) {
  torch::manual_seed(1);
  return make();
}

inline std::shared_ptr<Net> make_net() {
  return seeded([] { return std::make_shared<Net>(); });
}

inline NamedTensors gradients_of(const torch::nn::Module& module) {
  NamedTensors gradients;
  for (const auto& item : module.named_parameters()) gradients.emplace_back(item.key(), item.value().grad());
  return gradients;
}

inline NamedTensors values_of(const torch::nn::Module& module) {
  NamedTensors values;
  for (const auto& item : module.named_parameters()) values.emplace_back(item.key(), item.value().detach());
  return values;
}

/// Runs `run(module, rank)`, which does forward and backward and may return tensors, for all ranks on a plain model, and on a sharded one
/// on each rank, with every strategy, twice (the second time with read-ahead). What it returns must be the same bits, and the gradients
/// the plain ones' mean: the same bits on one rank, equal to rounding on several. Called in each rank.
template <typename Make, typename Run>
void expect_like_plain(const Make& make, const UnitPredicate& units, const Run& run) {
  const auto mesh = line();
  const int ranks = static_cast<int>(mesh.size());
  const auto plain = seeded(make);
  std::vector<at::Tensor> expected;
  for (int rank = 0; rank < ranks; ++rank) {
    const std::vector<at::Tensor> result = run(*plain, rank);
    if (rank == mesh.rank()) expected = result;
  }
  auto gradients = gradients_of(*plain);
  for (auto& [name, gradient] : gradients) {
    if (gradient.defined()) gradient = gradient / ranks;
  }
  for (const auto& strategy : all_strategies()) {
    const auto model = seeded(make);
    auto sharded = fully_shard(*model, {.mesh = mesh, .units = units, .placements = Placements::from_name(strategy)});
    for (int pass = 0; pass < 2; ++pass) {
      const std::string what = strategy + ", pass " + std::to_string(pass);
      sharded.zero_grad();
      const std::vector<at::Tensor> result = run(*model, static_cast<int>(mesh.rank()));
      ASSERT_EQ(result.size(), expected.size()) << what;
      for (std::size_t i = 0; i < result.size(); ++i) EXPECT_TRUE(torch::equal(result[i], expected[i])) << what << ", result " << i;
      expect_same(sharded.full_gradients(), gradients, ranks == 1 ? 0 : 1e-5, what);
      for (const auto& parameter : model->parameters()) EXPECT_FALSE(parameter.grad().defined()) << what;
    }
  }
}

}  // namespace fsdp::testing
