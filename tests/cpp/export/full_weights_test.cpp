// Whole weights in a stream: the values of the unsharded model for every way to shard it, with the least bytes and two buckets of memory,
// and consumers that stop, fail or wait.

#include "fsdp/full_weights.h"

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "comm/launch/launch.h"
#include "export/pieces.h"
#include "fsdp/fsdp.h"
#include "support/hosts.h"
#include "support/messages.h"
#include "support/multi_rank.h"
#include "support/same_bits.h"
#include "support/shardings.h"
#include "support/stack.h"
#include "support/training.h"

namespace full_weights_test {

using fsdp::CommError;
using fsdp::Error;
using fsdp::FullWeightsOptions;
using fsdp::WeightReceivers;
using fsdp::testing::has;
using fsdp::testing::line;
using fsdp::testing::message_of;
using fsdp::testing::NamedTensors;
using fsdp::testing::run_ranks;
using fsdp::testing::same_bits;
using fsdp::testing::stack_units;
using fsdp::testing::Training;

/// Copies of all weights.
NamedTensors all_of(torch::nn::Module& module, FullWeightsOptions options = {}) {
  NamedTensors all;
  for (const auto& bucket : fsdp::full_weights(module, std::move(options))) {
    for (const auto& [name, weight] : bucket.weights) {
      EXPECT_TRUE(weight.is_contiguous()) << name;
      EXPECT_TRUE(weight.is_alias_of(bucket.flat)) << name;
      EXPECT_EQ(weight.storage_offset() * static_cast<std::int64_t>(weight.itemsize()) % 64, 0) << name;
      all.emplace_back(name, weight.clone());
    }
  }
  return all;
}

/// The parameters and buffers of a model that nobody has sharded.
NamedTensors values_of(const torch::nn::Module& module) {
  NamedTensors values;
  for (const auto& parameter : module.named_parameters()) values.emplace_back(parameter.key(), parameter.value().detach().clone());
  for (const auto& buffer : module.named_buffers()) values.emplace_back(buffer.key(), buffer.value().clone());
  return values;
}

/// What the main parameters are, by another way out of the engine.
NamedTensors state_of(Training& training) {
  NamedTensors state = training.handle->full_parameters();
  for (const auto& buffer : training.model->named_buffers()) state.emplace_back(buffer.key(), buffer.value());
  return state;
}

NamedTensors in_dtype(NamedTensors values, at::ScalarType dtype) {
  for (auto& [name, value] : values) value = value.to(dtype);
  return values;
}

void expect_same(const NamedTensors& found, const NamedTensors& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    EXPECT_EQ(found[i].first, expected[i].first);
    EXPECT_TRUE(same_bits(found[i].second, expected[i].second)) << found[i].first;
  }
}

/// What rank has of all parameters, and what all have, in bytes of 4 per element.
struct Owned {
  std::int64_t own = 0;
  std::int64_t all = 0;
};
Owned owned(const fsdp::FSDPModule& handle) {
  Owned owned;
  for (const auto& shard : handle.parameter_shards()) {
    owned.own += 4 * shard.value.numel();
    owned.all += 4 * c10::multiply_integers(shard.shape);
  }
  return owned;
}

TEST(FullWeights, AreTheUnshardedModelsForEverySharding) {
  run_ranks(
      4,
      [](int rank) {
        torch::manual_seed(11);
        fsdp::testing::Stack plain;
        plain->register_buffer("counts", torch::randn({3, 2}));
        const auto initial = values_of(*plain);
        for (auto& [name, options, compute] : fsdp::testing::shardings(stack_units(), "blocks.1")) {
          SCOPED_TRACE(name);
          Training training(options);
          expect_same(all_of(*training.model), initial);
          const auto dtype = options.mixed_precision ? at::kBFloat16 : at::kFloat;
          const auto step = [&](int number) {
            const auto x = fsdp::testing::stack_input(number, rank).to(dtype);
            training.model->forward(x).square().mean().backward();
            training.optimizer->step();
            training.optimizer->zero_grad();
          };
          step(0);
          const auto state = state_of(training);
          EXPECT_FALSE(same_bits(state.front().second, initial.front().second));
          for (const std::int64_t bucket_bytes : {300, 1 << 20})
            expect_same(all_of(*training.model, {.bucket_bytes = bucket_bytes}), state);
          expect_same(all_of(*training.model, {.dtype = at::kBFloat16}), in_dtype(state, at::kBFloat16));
          for (const auto ranks : {WeightReceivers::kFirst, WeightReceivers::kOnePerHost}) {
            const auto found = all_of(*training.model, {.bucket_bytes = 300, .ranks = ranks});
            if (rank == 0) {
              expect_same(found, state);
            } else {
              EXPECT_TRUE(found.empty());
            }
          }
          // Nothing was changed.
          step(1);
          expect_same(all_of(*training.model), state_of(training));
        }
      },
      std::chrono::seconds(400));
}

TEST(FullWeights, AreReadBetweenMicrobatches) {
  run_ranks(2, [](int rank) {
    for (const bool exports : {false, true}) {
      static NamedTensors without;
      Training training;
      const auto before = state_of(training);
      for (int micro = 0; micro < 3; ++micro) {
        training.handle->set_requires_gradient_sync(micro == 2);
        fsdp::testing::stack_loss(training.model, micro, rank).backward();
        if (exports) expect_same(all_of(*training.model, {.bucket_bytes = 500}), before);
      }
      training.optimizer->step();
      if (!exports) without = state_of(training);
      if (exports) expect_same(state_of(training), without);
    }
  });
}

TEST(FullWeights, TakeTheLeastBytesAndTwoBucketsOfMemory) {
  for (const int size : {2, 4}) {
    run_ranks(size, [size](int rank) {
      // Many rows do not divide by the ranks, and a shard has padding.
      Training training({.granularity = [](const std::string&, const at::Tensor&) { return fsdp::Granularity::rows(); }});
      training.train(0, 1);
      const auto [own, all] = owned(*training.handle);
      const std::int64_t counts = 64;  // The buffer, which does not travel, aligned.
      const std::int64_t most = 2 * (all + counts + 64 * 30);
      const auto sent = [&](const FullWeightsOptions& options) {
        training.handle->reset_wire_stats();
        training.handle->reset_peak_memory_stats();
        const auto before = training.handle->memory_stats();
        all_of(*training.model, options);
        const auto after = training.handle->memory_stats();
        EXPECT_EQ(after.gathered_parameters.live, before.gathered_parameters.live);
        const auto held = after.gathered_parameters.peak - before.gathered_parameters.live;
        // A bucket takes its tensors, aligned; the largest tensor has 22 x 10 elements.
        EXPECT_LE(held, 2 * std::max<std::int64_t>(options.bucket_bytes, 896));
        EXPECT_LE(held, most);
        return training.handle->wire_stats();
      };
      for (const std::int64_t bucket_bytes : {std::int64_t{1}, std::int64_t{1000}, std::int64_t{1} << 20}) {
        EXPECT_EQ(sent({.bucket_bytes = bucket_bytes}).all_gather_bytes, (size - 1) * own);
        EXPECT_EQ(sent({.bucket_bytes = bucket_bytes, .dtype = at::kBFloat16}).all_gather_bytes, (size - 1) * own / 2);
        const auto to_first = sent({.bucket_bytes = bucket_bytes, .ranks = WeightReceivers::kFirst});
        EXPECT_EQ(to_first.all_gather_bytes, rank == 0 ? 0 : own);
      }
      EXPECT_EQ(sent({.bucket_bytes = 1 << 20}).all_gathers, 1);
      // The others hold what they send.
      training.handle->reset_peak_memory_stats();
      const auto before = training.handle->memory_stats().gathered_parameters.live;
      all_of(*training.model, {.ranks = WeightReceivers::kFirst});
      const auto held = training.handle->memory_stats().gathered_parameters.peak - before;
      if (rank != 0) {
        EXPECT_LE(held, own + 64 * 30);
      }
    });
  }
}

TEST(FullWeights, BucketsKeepTheOrderAndTheBudget) {
  run_ranks(2, [](int) {
    Training training;
    const auto state = state_of(training);
    for (const std::int64_t budget : {64, 700, 2000}) {
      std::size_t next = 0, buckets = 0;
      auto range = fsdp::full_weights(*training.model, {.bucket_bytes = budget});
      std::int64_t room = 0;  // in the bucket before
      for (const auto& bucket : range) {
        ++buckets;
        EXPECT_FALSE(bucket.weights.empty());
        EXPECT_TRUE(bucket.flat.numel() <= budget || bucket.weights.size() == 1);
        const auto first = static_cast<std::int64_t>(bucket.weights.front().second.nbytes());
        EXPECT_TRUE(buckets == 1 || (first + 63) / 64 * 64 > room);  // It did not fit there.
        room = budget - bucket.flat.numel();
        for (const auto& [name, weight] : bucket.weights) EXPECT_EQ(name, state.at(next++).first);
      }
      EXPECT_EQ(next, state.size());
      EXPECT_EQ(buckets, range.size());
    }
    const auto some = all_of(*training.model, {.names = {{"head.bias", "counts", "blocks.2.up.weight"}}});
    ASSERT_EQ(some.size(), 3U);
    EXPECT_EQ(some[0].first, "blocks.2.up.weight");
    EXPECT_EQ(some[1].first, "head.bias");
    EXPECT_EQ(some[2].first, "counts");
  });
}

TEST(FullWeights, TheNextGatherHasStartedWhenABucketIsGiven) {
  run_ranks(2, [](int) {
    Training training;
    auto range = fsdp::full_weights(*training.model, {.bucket_bytes = 1});
    std::int64_t given = 0;
    training.handle->reset_wire_stats();  // The first gather has started.
    for (const auto& bucket : range) {
      ++given;
      EXPECT_FALSE(bucket.weights.empty());
      const auto gathers = static_cast<std::int64_t>(range.size()) - 1;  // The buffer is not gathered.
      EXPECT_EQ(training.handle->wire_stats().all_gathers, std::min(given, gathers - 1));
    }
  });
}

TEST(FullWeights, ATensorOfAnEarlierBucketIsAnErrorAndNotOtherValues) {
  run_ranks(2, [](int) {
    Training training;
    std::vector<at::Tensor> kept;
    for (const auto& bucket : fsdp::full_weights(*training.model, {.bucket_bytes = 1})) kept.push_back(bucket.weights.front().second);
    for (const auto& tensor : kept) {
      const auto text = message_of<std::exception>([&] { tensor.const_data_ptr<float>(); });
      EXPECT_NE(text, "no error");
    }
  });
}

/// How a rank uses a range.
enum class Consumer { kTakesAll, kStops, kThrows, kSleeps, kLeavesOpen };

/// The error of the range on this rank; empty if there is none.
std::string consume(Training& training, Consumer consumer, std::size_t at) {
  std::size_t taken = 0;
  try {
    auto range = fsdp::full_weights(*training.model, {.bucket_bytes = 200});
    for (const auto& bucket : range) {
      EXPECT_FALSE(bucket.weights.empty());
      if (taken++ != at) continue;
      if (consumer == Consumer::kStops) break;
      if (consumer == Consumer::kThrows) throw std::runtime_error("the consumer's own");
      if (consumer == Consumer::kSleeps) usleep(200'000);
      if (consumer != Consumer::kLeavesOpen) continue;
      return message_of([&] { training.train(90, 91); });
    }
  } catch (const CommError& error) {
    return std::string("CommError ") + error.what();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

TEST(FullWeights, ARankMayStopThrowSleepOrForgetAtAnyBucketAndTrainingGoesOn) {
  for (const int size : {2, 3}) {
    run_ranks(size, [size](int rank) {
      Training reference, training;
      reference.train(0, 1);
      training.train(0, 1);
      const std::size_t buckets = fsdp::full_weights(*training.model, {.bucket_bytes = 200}).size();
      ASSERT_GT(buckets, 5U);
      int step = 1;
      for (std::size_t at = 0; at < buckets; ++at) {
        for (const auto what : {Consumer::kStops, Consumer::kThrows, Consumer::kSleeps, Consumer::kLeavesOpen}) {
          if ((what == Consumer::kSleeps || size > 2) && at % 5 != 0) continue;
          if (what == Consumer::kLeavesOpen && at + 1 >= buckets) continue;  // Nothing more is to be gathered then.
          SCOPED_TRACE("bucket " + std::to_string(at) + ", " + std::to_string(static_cast<int>(what)));
          const int who = static_cast<int>(at) % size;
          const auto text = consume(training, rank == who ? what : Consumer::kTakesAll, at);
          // After this bucket, one more has started; those after it are agreed on, and that it may be given.
          const bool others_notice = what != Consumer::kSleeps && at + 1 < buckets;
          if (rank != who) {
            EXPECT_EQ(has(text, "rank " + std::to_string(who) + " has stopped before bucket " + std::to_string(std::min(at + 3, buckets)) +
                                    " of"),
                      others_notice)
                << text;
            if (!others_notice) {
              EXPECT_EQ(text, "");
            }
          } else if (what == Consumer::kThrows) {
            EXPECT_EQ(text, "the consumer's own");
          } else if (what == Consumer::kLeavesOpen) {
            EXPECT_TRUE(has(text, "full_weights was left open before bucket")) << text;
          } else {
            EXPECT_EQ(text, "");
          }
          reference.train(step, step + 1);
          training.train(step, step + 1);
          ++step;
          fsdp::testing::expect_same_bits(training.handle->full_parameters(), reference.handle->full_parameters());
        }
      }
      EXPECT_EQ(training.handle->memory_stats().gathered_parameters.live, reference.handle->memory_stats().gathered_parameters.live);
    });
  }
}

TEST(FullWeights, AllMayStopTogetherOrLeaveItOpen) {
  run_ranks(2, [](int) {
    Training training;
    EXPECT_EQ(consume(training, Consumer::kStops, 2), "");
    EXPECT_TRUE(has(consume(training, Consumer::kLeavesOpen, 2), "was left open before bucket 5 of"));
    auto open = std::make_unique<fsdp::FullWeights>(fsdp::full_weights(*training.model, {.bucket_bytes = 200}));
    auto text = message_of([&] { fsdp::full_weights(*training.model); });
    EXPECT_TRUE(has(text, "was left open")) << text;
    open.reset();
    open = std::make_unique<fsdp::FullWeights>(fsdp::full_weights(*training.model, {.bucket_bytes = 200}));
    text = message_of([&] { training.optimizer->step(); });
    EXPECT_TRUE(has(text, "was left open")) << text;
    for (const auto& bucket : *open) FAIL() << bucket.weights.size();
    training.train(0, 1);
    expect_same(all_of(*training.model), state_of(training));
  });
}

TEST(FullWeights, ARankThatDiesIsAnErrorAndNoHang) {
  for (const bool shared_memory : {true, false}) {
    ::testing::internal::CaptureStderr();
    const int result = fsdp::comm::launch_ranks(
        2,
        [&] {
          alarm(100);
          Training training({.mesh = fsdp::init_device_mesh("cpu", {{"dp_shard", -1}}, {.shared_memory = shared_memory})});
          int taken = 0;
          const auto text = message_of<CommError>([&] {
            for (const auto& bucket : fsdp::full_weights(*training.model, {.bucket_bytes = 200})) {
              if (training.mesh.rank() == 1 && !bucket.weights.empty() && ++taken == 3) _exit(3);
            }
          });
          if (!has(text, "full_weights") && !has(text, "gather of weights")) throw std::runtime_error("message: " + text);
          return 0;
        },
        {.grace = std::chrono::seconds(20)});
    EXPECT_EQ(result, 3);
    EXPECT_EQ(::testing::internal::GetCapturedStderr(), "rank 1 left by exit(3) before its function returned\n");
  }
}

TEST(FullWeights, WhatIsWrongIsOneErrorOnEveryRank) {
  run_ranks(2, [](int rank) {
    Training training;
    const auto refused = [&](const FullWeightsOptions& options) {
      const auto text = message_of([&] { fsdp::full_weights(*training.model, options); });
      training.train(0, 1);  // goes on
      return text;
    };
    EXPECT_TRUE(has(refused({.bucket_bytes = 0}), "full_weights: bucket_bytes is 0"));
    EXPECT_TRUE(has(refused({.bucket_bytes = -5}), "full_weights: bucket_bytes is -5"));
    EXPECT_TRUE(has(refused({.dtype = at::kInt}), "full_weights: dtype Int is no floating-point dtype"));
    EXPECT_TRUE(has(refused({.names = {{"head.bias", "head.bais"}}}), "no parameter or buffer 'head.bais'"));
    // On one rank only.
    auto text = refused({.bucket_bytes = rank == 0 ? 100 : 0});
    EXPECT_TRUE(has(text, "rank 0 has 'bucket_bytes 100', rank 1 has 'bucket_bytes 0'")) << text;
    text = refused({.names = {{rank == 0 ? "head.bias" : "no such"}}});
    EXPECT_TRUE(has(text, "no parameter or buffer 'no such'")) << text;
    text = refused({.names = {{rank == 0 ? "head.bias" : "head.weight"}}});
    EXPECT_TRUE(has(text, "rank 0 has ''head.bias'")) << text;
    text = refused({.dtype = rank == 0 ? at::kBFloat16 : at::kHalf});
    EXPECT_TRUE(has(text, "rank 0 has 'dtype BFloat16', rank 1 has 'dtype Half'")) << text;
    text = refused({.ranks = rank == 0 ? WeightReceivers::kAll : WeightReceivers::kFirst});
    EXPECT_TRUE(has(text, "rank 0 has 'ranks all', rank 1 has 'ranks the first'")) << text;
    text = message_of([&] { fsdp::full_weights(*torch::nn::Linear(2, 2)); });
    EXPECT_NE(text, "no error");
  });
}

TEST(FullWeights, PutTensorParallelPiecesTogether) {
  run_ranks(4, [](int rank) {
    const auto grid = fsdp::init_device_mesh("cpu", {{"tp", 2}, {"dp_shard", 2}});
    const bool is_first = grid.coordinate("tp") == 0;
    fsdp::testing::PiecesImpl model(is_first ? 0 : 3, is_first ? 3 : 10);  // of different sizes
    const auto handle = fsdp::testing::shard_pieces(model, grid);
    const auto numbers = at::arange(60, at::kFloat);
    const NamedTensors expected = {{"rows", numbers.view({10, 6})}, {"columns", numbers.view({6, 10})}, {"all", numbers}};
    for (const std::int64_t bucket_bytes : {1, 1 << 20}) expect_same(all_of(model, {.bucket_bytes = bucket_bytes}), expected);
    expect_same(all_of(model, {.dtype = at::kBFloat16}), in_dtype(expected, at::kBFloat16));
    expect_same(all_of(model, {.ranks = WeightReceivers::kFirst}), rank == 0 ? expected : NamedTensors());
    expect_same(all_of(model, {.names = std::vector<std::string>{"columns"}}), {expected[1]});
    // What has changed: one element of each piece, whose positions are those in the whole.
    const auto since = std::make_shared<fsdp::WeightSnapshot>();
    for ([[maybe_unused]] const auto& bucket : fsdp::full_weights(model, {.since = since})) {
    }
    auto changed = expected;
    for (auto& [name, value] : changed) value = value.clone();
    {
      const torch::NoGradGuard no_grad;
      const auto begin = is_first ? 0 : 3;
      model.columns.narrow(0, 2, 1).narrow(1, 1, 1).fill_(100 + begin);
    }
    for (const auto begin : {0, 3}) changed[1].second[2][begin + 1] = 100 + begin;
    auto received = expected[1].second.clone();
    for (const auto& bucket : fsdp::full_weights(model, {.since = since})) {
      EXPECT_TRUE(bucket.weights.empty());
      for (const auto& change : bucket.changes) {
        EXPECT_EQ(change.name, "columns");
        EXPECT_EQ(change.positions.numel(), 2);
        received.view({-1}).index_copy_(0, change.positions.to(at::kLong), change.values);
      }
    }
    EXPECT_TRUE(same_bits(received, changed[1].second));
    // A rank of another row stops.
    try {
      auto weights = fsdp::full_weights(model, {.bucket_bytes = 1});
      auto bucket = weights.begin();
      if (rank == 3) {
        weights.close();
      } else {
        for (; bucket != weights.end(); ++bucket) {
        }
        ADD_FAILURE() << "not told";
      }
    } catch (const Error& error) {
      EXPECT_TRUE(has(error.what(), "has stopped before bucket 3 of 3")) << error.what();
    }
    expect_same(all_of(model), changed);
  });
}

TEST(FullWeights, OneRankOfEachHostReceives) {
  if (!fsdp::testing::can_pretend_hosts()) GTEST_SKIP() << "this system refuses mount namespaces";
  run_ranks(4, [](int rank) {
    fsdp::testing::pretend_hosts(rank, 2);
    Training training;
    const auto [own, all] = owned(*training.handle);
    const auto state = state_of(training);
    training.handle->reset_wire_stats();
    const auto found = all_of(*training.model, {.bucket_bytes = 500, .ranks = WeightReceivers::kOnePerHost});
    EXPECT_EQ(training.handle->wire_stats().all_gather_bytes, (rank % 2 == 0 ? 1 : 2) * own);
    if (rank % 2 == 0) expect_same(found, state);
    if (rank % 2 != 0) {
      EXPECT_TRUE(found.empty());
    }
  });
}

TEST(FullWeights, OneRankAloneGetsCopies) {
  run_ranks(1, [] {
    Training training;
    const auto found = all_of(*training.model);
    expect_same(found, state_of(training));
    const auto before = found.front().second.clone();
    training.train(0, 1);
    EXPECT_TRUE(same_bits(found.front().second, before));
  });
}

}  // namespace full_weights_test
