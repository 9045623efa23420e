// Whole weights since a snapshot: a receiver that applies the changes has the bits of a whole export, for every way to shard.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "fsdp/fsdp.h"
#include "support/messages.h"
#include "support/multi_rank.h"
#include "support/same_bits.h"
#include "support/shardings.h"
#include "support/stack.h"
#include "support/training.h"

namespace changed_weights_test {

using fsdp::FullWeightsOptions;
using fsdp::WeightSnapshot;
using fsdp::testing::has;
using fsdp::testing::message_of;
using fsdp::testing::run_ranks;
using fsdp::testing::same_bits;
using fsdp::testing::Training;

/// What a receiver has, and what it was sent last.
struct Receiver {
  std::map<std::string, at::Tensor> weights;
  std::int64_t whole = 0;
  std::int64_t changed = 0;

  double take(torch::nn::Module& module, const FullWeightsOptions& options) {
    whole = changed = 0;
    auto range = fsdp::full_weights(module, options);
    for (const auto& bucket : range) {
      for (const auto& [name, weight] : bucket.weights) {
        ++whole;
        weights[name] = weight.clone();
      }
      for (const auto& [name, shape, positions, values] : bucket.changes) {
        ++changed;
        EXPECT_EQ(weights.at(name).sizes(), at::IntArrayRef(shape));
        weights.at(name).view({-1}).index_copy_(0, positions.to(at::kLong), values);
      }
    }
    return range.changed_fraction();
  }

  void expect_whole(torch::nn::Module& module, FullWeightsOptions options) const {
    options.since = nullptr;
    std::size_t count = 0;
    for (const auto& bucket : fsdp::full_weights(module, options)) {
      EXPECT_TRUE(bucket.changes.empty());
      for (const auto& [name, weight] : bucket.weights) {
        ++count;
        EXPECT_TRUE(same_bits(weights.at(name), weight)) << name;
      }
    }
    EXPECT_EQ(weights.size(), count);
  }
};

TEST(ChangedWeights, GiveTheBitsOfAWholeExportForEverySharding) {
  run_ranks(
      4,
      [](int rank) {
        for (auto& [name, options, compute] : fsdp::testing::shardings(fsdp::testing::stack_units(), "blocks.1")) {
          SCOPED_TRACE(name);
          Training training(options);
          const auto dtype = options.mixed_precision ? at::kBFloat16 : at::kFloat;
          Receiver all, first;
          const FullWeightsOptions to_all = {.dtype = at::kBFloat16, .since = std::make_shared<WeightSnapshot>()};
          const FullWeightsOptions to_first = {.ranks = fsdp::WeightReceivers::kFirst,
                                               .since = std::make_shared<WeightSnapshot>(at::Device(at::kCPU))};
          training.optimizer->set_lr(1e-5);
          for (int step = 0; step < 3; ++step) {
            const auto fraction = all.take(*training.model, to_all);
            first.take(*training.model, to_first);
            all.expect_whole(*training.model, to_all);
            first.expect_whole(*training.model, to_first);
            if (step == 0) {
              EXPECT_EQ(fraction, 1);
            } else {
              EXPECT_GT(fraction, 0);
              EXPECT_LT(fraction, 0.3);  // Most updates are too small for bf16.
              EXPECT_GT(all.changed, 0);
            }
            const auto x = fsdp::testing::stack_input(step, rank).to(dtype);
            training.model->forward(x).square().mean().backward();
            training.optimizer->step();
            training.optimizer->zero_grad();
          }
          all.take(*training.model, to_all);
          EXPECT_EQ(all.take(*training.model, to_all), 0);
          EXPECT_EQ(all.whole + all.changed, 0);
        }
      },
      std::chrono::seconds(400));
}

TEST(ChangedWeights, AllIsSentAfterAStreamThatStoppedEarlyAndRanksWithOtherSnapshotsAreAnError) {
  run_ranks(2, [](int rank) {
    Training training;
    Receiver receiver;
    const FullWeightsOptions options = {.since = std::make_shared<WeightSnapshot>()};
    EXPECT_EQ(options.since->nbytes(), 0);
    EXPECT_EQ(receiver.take(*training.model, options), 1);
    EXPECT_GT(options.since->nbytes(), 0);
    EXPECT_EQ(receiver.take(*training.model, options), 0);
    training.train(0, 1);
    {
      auto range = fsdp::full_weights(*training.model, options);
      EXPECT_FALSE(range.begin()->weights.empty());
    }
    EXPECT_EQ(receiver.take(*training.model, options), 1);
    receiver.expect_whole(*training.model, options);
    const auto other = message_of<fsdp::Error>(
        [&] { fsdp::full_weights(*training.model, {.since = rank == 0 ? options.since : std::make_shared<WeightSnapshot>()}); });
    EXPECT_TRUE(has(other, "rank 1 has 'since a snapshot after 0 streams'")) << other;
    const auto dtype = message_of<fsdp::Error>([&] { fsdp::full_weights(*training.model, {.dtype = at::kHalf, .since = options.since}); });
    EXPECT_TRUE(has(dtype, "where this stream has 'entry.weight' [10, 3] Half")) << dtype;
    EXPECT_EQ(receiver.take(*training.model, options), 0);
  });
}

}  // namespace changed_weights_test
