// Whole weights for some of the ranks, of parameters that several dimensions of the mesh cut: each byte is sent once to each rank that
// receives it, and no rank passes it on.

#include "export/route.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "comm/mesh/device_mesh_state.h"
#include "comm/mesh/joined_row.h"
#include "export/pieces.h"
#include "fsdp/fsdp.h"
#include "support/hosts.h"
#include "support/multi_rank.h"
#include "support/same_bits.h"
#include "support/training.h"

namespace route_test {

using fsdp::FullWeightsOptions;
using fsdp::WeightReceivers;
using fsdp::testing::NamedTensors;
using fsdp::testing::run_ranks;
using fsdp::testing::same_bits;
using fsdp::testing::Training;

NamedTensors all_of(torch::nn::Module& module, FullWeightsOptions options) {
  NamedTensors all;
  for (const auto& bucket : fsdp::full_weights(module, std::move(options))) {
    for (const auto& [name, weight] : bucket.weights) all.emplace_back(name, weight.clone());
  }
  return all;
}

void expect_same(const NamedTensors& found, const NamedTensors& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    EXPECT_EQ(found[i].first, expected[i].first);
    EXPECT_TRUE(same_bits(found[i].second, expected[i].second)) << found[i].first;
  }
}

std::int64_t owned_bytes(const fsdp::FSDPModule& handle) {
  std::int64_t bytes = 0;
  for (const auto& shard : handle.parameter_shards()) bytes += static_cast<std::int64_t>(shard.value.nbytes());
  return bytes;
}

fsdp::FullyShardOptions hfsdp(bool by_rows) {
  fsdp::FullyShardOptions options{.mesh = fsdp::init_device_mesh("cpu", {{"outer", 2}, {"shard", 2}}),
                                  .outer_placements = fsdp::Placements::optim()};
  if (by_rows) options.granularity = [](const std::string&, const at::Tensor&) { return fsdp::Granularity::rows(); };
  return options;
}

/// The whole state, with the model's one buffer.
NamedTensors state_of(Training& training) {
  auto state = training.handle->full_parameters();
  for (const auto& buffer : training.model->named_buffers()) state.emplace_back(buffer.key(), buffer.value());
  return state;
}

TEST(Route, OfCutShardsToTheFirstRankTakesTheLeastBytes) {
  run_ranks(
      4,
      [](int rank) {
        for (const bool by_rows : {false, true}) {
          Training training(hfsdp(by_rows));
          training.train(0, 1);
          const auto own = owned_bytes(*training.handle);
          const auto state = state_of(training);
          const auto sent = [&](const FullWeightsOptions& options) {
            training.handle->reset_wire_stats();
            const auto found = all_of(*training.model, options);
            if (options.dtype) {
              EXPECT_EQ(found.size(), rank == 0 ? state.size() : 0);
            } else {
              expect_same(found, rank == 0 ? state : NamedTensors());
            }
            return training.handle->wire_stats().all_gather_bytes;
          };
          for (const std::int64_t bucket_bytes : {std::int64_t{1}, std::int64_t{1000}, std::int64_t{1} << 20}) {
            EXPECT_EQ(sent({.bucket_bytes = bucket_bytes, .ranks = WeightReceivers::kFirst}), rank == 0 ? 0 : own);
          }
          EXPECT_EQ(sent({.dtype = at::kBFloat16, .ranks = WeightReceivers::kFirst}), rank == 0 ? 0 : own / 2);
          // The connections are made once, and what they carry needs no memory on those that send.
          EXPECT_EQ(fsdp::comm::joined_rows_of(training.mesh).size(), 1U);
          training.handle->reset_peak_memory_stats();
          const auto before = training.handle->memory_stats().gathered_parameters.live;
          all_of(*training.model, {.ranks = WeightReceivers::kFirst});
          const auto held = training.handle->memory_stats().gathered_parameters.peak - before;
          if (rank != 0) {
            EXPECT_LE(held, own + 64 * 30);
          }
          // Of what has changed, too.
          const auto since = std::make_shared<fsdp::WeightSnapshot>();
          expect_same(all_of(*training.model, {.ranks = WeightReceivers::kFirst, .since = since}), rank == 0 ? state : NamedTensors());
          training.handle->reset_wire_stats();
          EXPECT_TRUE(all_of(*training.model, {.ranks = WeightReceivers::kFirst, .since = since}).empty());
          EXPECT_EQ(training.handle->wire_stats().all_gather_bytes, 0);
          training.train(1, 2);  // which changes all parameters, and not the buffer
          const auto changed = training.handle->full_parameters();
          expect_same(all_of(*training.model, {.ranks = WeightReceivers::kFirst, .since = since}), rank == 0 ? changed : NamedTensors());
        }
      },
      std::chrono::seconds(200));
}

TEST(Route, OfAllRanksGoesThroughTheRowsOfTheMesh) {
  run_ranks(4, [](int) {
    Training training(hfsdp(false));
    const auto own = owned_bytes(*training.handle);
    const auto state = state_of(training);
    training.handle->reset_wire_stats();
    expect_same(all_of(*training.model, {}), state);
    const auto sum = [&](std::int64_t bytes) { return training.mesh.sum(static_cast<double>(bytes)); };
    EXPECT_EQ(sum(training.handle->wire_stats().all_gather_bytes), 3 * sum(own));  // each rank gets what it has not
    EXPECT_TRUE(fsdp::comm::joined_rows_of(training.mesh).empty());
  });
}

TEST(Route, WithoutJoinedRowsPassesBytesOn) {
  run_ranks(4, [](int rank) {
    auto options = hfsdp(false);
    options.mesh.state()->joined = nullptr;  // as on devices
    Training training(options);
    const auto own = owned_bytes(*training.handle);
    const auto state = state_of(training);
    training.handle->reset_wire_stats();
    expect_same(all_of(*training.model, {.ranks = WeightReceivers::kFirst}), rank == 0 ? state : NamedTensors());
    const auto sent = training.handle->wire_stats().all_gather_bytes;
    // Ranks 2 and 3 send along the outer dimension, and rank 1 its own bytes with those of rank 3.
    if (rank == 0) {
      EXPECT_EQ(sent, 0);
    }
    if (rank == 1) {
      EXPECT_GT(sent, own);
    }
    if (rank > 1) {
      EXPECT_EQ(sent, own);
    }
  });
}

TEST(Route, OfTensorParallelPiecesToTheFirstRankTakesTheLeastBytes) {
  run_ranks(4, [](int rank) {
    const auto grid = fsdp::init_device_mesh("cpu", {{"tp", 2}, {"dp_shard", 2}});
    const bool is_first = grid.coordinate("tp") == 0;
    fsdp::testing::PiecesImpl model(is_first ? 0 : 3, is_first ? 3 : 10);
    const auto handle = fsdp::testing::shard_pieces(model, grid);
    std::int64_t own = 0;
    for (const auto& shard : handle.parameter_shards()) {
      if (shard.name != "all" || is_first) own += static_cast<std::int64_t>(shard.value.nbytes());
    }
    const auto numbers = at::arange(60, at::kFloat);
    const NamedTensors expected = {{"rows", numbers.view({10, 6})}, {"columns", numbers.view({6, 10})}, {"all", numbers}};
    for (const std::int64_t bucket_bytes : {1, 1 << 20}) {
      const auto before = handle.wire_stats().all_gather_bytes;
      expect_same(all_of(model, {.bucket_bytes = bucket_bytes, .ranks = WeightReceivers::kFirst}), rank == 0 ? expected : NamedTensors());
      EXPECT_EQ(handle.wire_stats().all_gather_bytes - before, rank == 0 ? 0 : own);
    }
  });
}

TEST(Route, ToOneRankOfEachHostTakesTheLeastBytes) {
  if (!fsdp::testing::can_pretend_hosts()) GTEST_SKIP() << "this system refuses mount namespaces";
  run_ranks(4, [](int rank) {
    fsdp::testing::pretend_hosts(rank, 2);
    Training training(hfsdp(false));
    const auto own = owned_bytes(*training.handle);
    const auto state = state_of(training);
    training.handle->reset_wire_stats();
    const auto found = all_of(*training.model, {.bucket_bytes = 500, .ranks = WeightReceivers::kOnePerHost});
    EXPECT_EQ(training.handle->wire_stats().all_gather_bytes, (rank % 2 == 0 ? 1 : 2) * own);
    expect_same(found, rank % 2 == 0 ? state : NamedTensors());
  });
}

}  // namespace route_test
