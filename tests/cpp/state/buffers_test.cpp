// Buffers of any strides: saved, loaded, exported, sent by rank 0.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/fsdp.h"
#include "support/checkpoint_test.h"
#include "support/messages.h"
#include "support/multi_rank.h"
#include "support/same_bits.h"

namespace buffers_test {

using fsdp::testing::line;
using fsdp::testing::run_ranks;
using fsdp::testing::same_bits;

using Buffers = fsdp::testing::CheckpointTest;

/// Values from `seed` on, in memory of all kinds.
std::map<std::string, at::Tensor> all_kinds(double seed) {
  const auto values = [&](at::IntArrayRef sizes) {
    return (at::arange(c10::multiply_integers(sizes), at::kFloat) + seed).view(sizes).clone();
  };
  const auto complex = at::complex(values({2, 3}), values({2, 3}) * 2);
  return {{"dense", values({2, 3})},
          {"expanded", values({3, 3}).tril().expand({2, 3, 3})},
          {"expanded_scalar", values({}).expand({4, 2})},
          {"expanded_twice", values({1, 3, 1}).expand({2, 3, 4})},
          {"transposed", values({2, 3}).t()},
          {"permuted", values({2, 3, 4}).permute({2, 0, 1})},
          {"channels_last", values({2, 3, 2, 2}).contiguous(at::MemoryFormat::ChannelsLast)},
          {"every_second", values({4, 6}).slice(1, 0, 6, 2)},
          {"windows", values({5}).unfold(0, 3, 1)},
          {"conjugate", at::conj(complex)},
          {"imaginary_of_conjugate", at::imag(at::conj(complex))},
          {"nothing", values({0, 3}).t()},
          {"bits", values({2, 2}).to(at::kLong).t()}};
}

struct NetImpl : torch::nn::Module {
  explicit NetImpl(double seed) : linear(register_module("linear", torch::nn::Linear(3, 3))) {
    for (const auto& [name, value] : all_kinds(seed)) register_buffer(name, value);
  }
  torch::nn::Linear linear;
};
TORCH_MODULE(Net);

void expect_values(NetImpl& net, double seed) {
  const auto found = net.named_buffers();
  for (const auto& [name, value] : all_kinds(seed)) {
    EXPECT_TRUE(same_bits(found[name].resolve_conj().resolve_neg().contiguous(), value.resolve_conj().resolve_neg().contiguous()))
        << name << "\n"
        << found[name] << "\n"
        << value;
  }
}

TEST_F(Buffers, OfAnyStridesAreSavedAndLoaded) {
  for (const int ranks : {1, 2}) {
    run_ranks(ranks, [&] {
      const auto step = path(std::to_string(ranks));
      Net saved(1);
      fsdp::fully_shard(*saved, {.mesh = line()});
      fsdp::save(step, *saved);
      expect_values(*saved, 1);
      {
        fsdp::AsyncSaver saver(*saved);
        saver.save(step + "-async");
        for (const auto& buffer : saved->buffers()) {
          if (buffer.is_non_overlapping_and_dense()) buffer.zero_();
        }
        saver.wait();
      }
      for (const auto* kind : {"", "-async"}) {
        for (const bool is_new : {true, false}) {
          Net other(100);
          auto sharded = fsdp::fully_shard(*other, {.mesh = line()});
          if (!is_new) sharded.main_parameters_changed();
          fsdp::load(step + kind, *other);
          expect_values(*other, 1);
          // What is expanded stays so, and shares its memory.
          const auto expanded = other->named_buffers()["expanded"];
          EXPECT_EQ(expanded.stride(0), 0);
          EXPECT_EQ(other->named_buffers()["transposed"].stride(0), 1);
        }
      }
    });
  }
}

// Then it can't stay expanded.
TEST_F(Buffers, ThatAreExpandedMayGetDifferentValues) {
  run_ranks(2, [&] {
    torch::nn::Linear saved(2, 2);
    saved->register_buffer("mask", at::arange(6, at::kFloat).view({2, 3}).clone());
    fsdp::fully_shard(*saved, {.mesh = line()});
    fsdp::save(path("1"), *saved);
    torch::nn::Linear other(2, 2);
    other->register_buffer("mask", at::zeros({3}).expand({2, 3}));
    fsdp::fully_shard(*other, {.mesh = line()});
    fsdp::load(path("1"), *other);
    EXPECT_TRUE(torch::equal(other->named_buffers()["mask"], at::arange(6, at::kFloat).view({2, 3})));
  });
}

TEST_F(Buffers, OfAnyStridesAreExported) {
  run_ranks(2, [&] {
    Net saved(1);
    fsdp::fully_shard(*saved, {.mesh = line()});
    const auto real = [](NetImpl& net) {  // safetensors has no complex numbers
      for (const auto* name : {"conjugate"}) net.named_buffers()[name].set_data(at::zeros({1}));
    };
    real(*saved);
    fsdp::export_safetensors(path("exported"), *saved);
    Net other(100);
    fsdp::fully_shard(*other, {.mesh = line()});
    real(*other);
    fsdp::load(path("exported"), *other);
    other->named_buffers()["conjugate"].set_data(all_kinds(1).at("conjugate"));
    expect_values(*other, 1);
  });
}

TEST_F(Buffers, OfAnyStridesComeFromRank0) {
  for (const int ranks : {2, 4}) {
    run_ranks(ranks, [&](int rank) {
      Net net(rank == 0 ? 1 : 100);
      const auto mesh = ranks == 2 ? line() : fsdp::init_device_mesh("cpu", {{"dp_replicate", 2}, {"dp_shard", 2}});
      fsdp::fully_shard(*net, {.mesh = mesh, .initial_values = fsdp::InitialValues::kFromRank0});
      expect_values(*net, 1);
      EXPECT_EQ(net->named_buffers()["expanded"].stride(0), 0);
    });
  }
}

TEST_F(Buffers, OfAnyStridesAreBuiltLater) {
  run_ranks(2, [&] {
    auto net = fsdp::deferred_init([] { return Net(1); });
    fsdp::fully_shard(*net, {.mesh = line()});
    expect_values(*net, 1);
    fsdp::save(path("1"), *net);
    Net other(100);
    fsdp::fully_shard(*other, {.mesh = line()});
    fsdp::load(path("1"), *other);
    expect_values(*other, 1);
  });
}

}  // namespace buffers_test
