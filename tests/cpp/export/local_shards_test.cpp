// Shards by address: the boxes of all ranks are the whole tensors for every way to shard, addresses stay, and writers wait for readers.

#include "fsdp/local_shards.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/mesh/ranks.h"
#include "fsdp/fsdp.h"
#include "support/messages.h"
#include "support/multi_rank.h"
#include "support/same_bits.h"
#include "support/shardings.h"
#include "support/stack.h"
#include "support/temporary_folder.h"
#include "support/training.h"

namespace local_shards_test {

using fsdp::LocalShard;
using fsdp::testing::has;
using fsdp::testing::message_of;
using fsdp::testing::NamedTensors;
using fsdp::testing::run_ranks;
using fsdp::testing::same_bits;
using fsdp::testing::stack_units;
using fsdp::testing::Training;

/// A tensor of the shard's shape with its boxes in their places, and zeros elsewhere.
at::Tensor placed(const LocalShard& shard, const std::function<at::Tensor(const fsdp::LocalBox&)>& value, at::ScalarType dtype) {
  auto whole = at::zeros(shard.shape, dtype);
  for (const auto& box : shard.boxes) {
    auto place = whole;
    for (std::size_t d = 0; d < box.sizes.size(); ++d) place = place.narrow(static_cast<std::int64_t>(d), box.offsets[d], box.sizes[d]);
    place.copy_(value(box));
  }
  return whole;
}

/// The whole parameters, of the boxes of all ranks.
NamedTensors reassembled(Training& training) {
  const fsdp::comm::Ranks ranks(training.mesh);
  NamedTensors found;
  const auto shards = fsdp::local_shards(*training.model);
  for (const auto& shard : shards.shards()) {
    const auto values = placed(
        shard, [](const fsdp::LocalBox& box) { return box.tensor; }, shard.dtype);
    const auto has_it = placed(
        shard, [](const fsdp::LocalBox& box) { return at::ones(box.sizes, at::kByte); }, at::kByte);
    const auto all = ranks.exchange(values.view({-1}).view(at::kByte), {.operation = "values", .unit = {}}).contiguous().view(shard.dtype);
    const auto of_all = ranks.exchange(has_it.view({-1}), {.operation = "boxes", .unit = {}}).to(at::kBool);
    EXPECT_TRUE(of_all.any(0).all().item<bool>()) << shard.name << " is incomplete";
    auto whole = at::zeros({values.numel()}, shard.dtype);
    // A unit with a mesh of its own, one of two rows, has other values in the other row: those of this row come last.
    const auto row = ranks.size() / 2;
    for (const bool own_row : {false, true}) {
      for (std::int64_t rank = 0; rank < ranks.size(); ++rank) {
        if ((rank / row == ranks.index() / row) == own_row) whole = at::where(of_all[rank], all[rank], whole);
      }
    }
    found.emplace_back(shard.name, whole.view(shard.shape));
  }
  return found;
}

/// Without the calls by which a program says that it will write.
std::vector<const void*> addresses(const fsdp::LocalShards& shards) {
  std::vector<const void*> found;
  for (const auto& shard : shards.shards()) {
    for (const auto& box : shard.boxes) found.push_back(box.tensor.const_data_ptr());
  }
  return found;
}

TEST(LocalShards, OfAllRanksAreTheWholeParametersForEverySharding) {
  for (const int size : {2, 4}) {
    run_ranks(size, [](int rank) {
      for (auto& [name, options, compute] : fsdp::testing::shardings(stack_units(), "blocks.1")) {
        SCOPED_TRACE(name);
        Training training(options);
        const auto x = fsdp::testing::stack_input(0, rank).to(options.mixed_precision ? at::kBFloat16 : at::kFloat);
        training.model->forward(x).square().mean().backward();
        training.optimizer->step();
        fsdp::testing::expect_same_bits(reassembled(training), training.handle->full_parameters());
      }
    });
  }
}

TEST(LocalShards, AreBoxesWithinRowsAndTheNumberOfBytesThatARankHas) {
  run_ranks(4, [](int) {
    Training training;  // element granularity: cuts fall within rows
    std::size_t several = 0;
    std::int64_t bytes = 0, expected = 0;
    const auto shards = fsdp::local_shards(*training.model);
    for (const auto& shard : shards.shards()) {
      several += shard.boxes.size() > 1 ? 1U : 0U;
      EXPECT_LE(shard.boxes.size(), 2 * std::max<std::size_t>(shard.shape.size(), 1) - 1);
      for (const auto& box : shard.boxes) {
        EXPECT_TRUE(box.tensor.is_contiguous());
        EXPECT_EQ(box.tensor.sizes(), at::IntArrayRef(box.sizes));
        bytes += static_cast<std::int64_t>(box.tensor.nbytes());
      }
    }
    const fsdp::comm::Ranks ranks(training.mesh);
    const auto counts = ranks.exchange(at::tensor({bytes, static_cast<std::int64_t>(several)}), {.operation = "counts", .unit = {}}).sum(0);
    for (const auto& parameter : training.model->parameters()) expected += 4 * parameter.numel();
    EXPECT_EQ(counts[0].item<std::int64_t>(), expected);
    EXPECT_GT(counts[1].item<std::int64_t>(), 0);
  });
}

TEST(LocalShards, StayWhereTheyAreAndOutliveTheModel) {
  fsdp::testing::TemporaryFolder folder;
  run_ranks(2, [&](int) {
    auto training = std::make_unique<Training>();
    const auto shards = fsdp::local_shards(*training->model);
    const auto before = addresses(shards);
    training->train(0, 5);
    const auto path = (folder.path() / "1").string();
    fsdp::save(path, *training->model, *training->optimizer);
    fsdp::load(path, *training->model, *training->optimizer);
    for (const auto& bucket : fsdp::full_weights(*training->model)) EXPECT_FALSE(bucket.weights.empty());
    training->handle->zero_grad();
    EXPECT_EQ(addresses(fsdp::local_shards(*training->model)), before);
    EXPECT_TRUE(shards.is_valid());
    const auto& last = shards.shards().back();
    const auto value = last.boxes.empty() ? at::Tensor() : last.boxes.front().tensor.clone();
    fsdp::fully_unshard(*training->model);
    EXPECT_FALSE(shards.is_valid());
    EXPECT_TRUE(has(message_of([&] { const auto reading = shards.reading(); }), "fully_unshard made ordinary again"));
    EXPECT_TRUE(has(message_of([&] { fsdp::local_shards(*training->model); }), "is not a unit of a sharded model"));
    training.reset();
    EXPECT_TRUE(last.boxes.empty() || same_bits(last.boxes.front().tensor, value));
  });
}

TEST(LocalShards, WhatOperatorsHaveWrittenIsThereWhenAReadingBegins) {
  run_ranks(2, [](int) {
    Training training;
    const auto shards = fsdp::local_shards(*training.model);
    {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : training.model->parameters()) parameter.fill_(3);
    }
    const auto reading = shards.reading();
    for (const auto& shard : shards.shards()) {
      for (const auto& box : shard.boxes) EXPECT_TRUE(box.tensor.eq(3).all().item<bool>()) << shard.name;
    }
  });
}

/// `write` waits on another thread while this one reads, which may use the model meanwhile; on this thread it is an Error.
void expect_waits(Training& training, const char* what, const std::function<void()>& write) {
  SCOPED_TRACE(what);
  const auto shards = fsdp::local_shards(*training.model);
  const auto values = [&] {
    std::vector<at::Tensor> found;
    for (const auto& shard : shards.shards()) {
      for (const auto& box : shard.boxes) found.push_back(box.tensor.clone());
    }
    return found;
  };
  std::atomic<bool> begun = false;
  std::future<void> written;
  {
    const auto reading = shards.reading();
    const auto before = values();
    EXPECT_TRUE(has(message_of(write), "by the thread that reads them"));
    written = std::async(std::launch::async, [&] {
      begun = true;
      write();
    });
    while (!begun) std::this_thread::yield();
    EXPECT_EQ(written.wait_for(std::chrono::milliseconds(50)), std::future_status::timeout);
    training.handle->finish_gradient_sync();  // takes the lock of the engine
    const auto after = values();
    for (std::size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(same_bits(before[i], after[i]));
  }
  written.get();
}

/// How a forked process ends that calls `body`.
int in_child(const std::function<void()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(30);
    body();
    _exit(::testing::Test::HasFailure() ? 1 : 0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  return status;
}

TEST(LocalShards, InAForkedProcessOnlyTheThreadReadsThatHasForked) {
  run_ranks(2, [](int rank) {
    Training training;
    fsdp::testing::stack_loss(training.model, 1, rank).backward();
    const auto shards = fsdp::local_shards(*training.model);
    const auto step = [&] { training.optimizer->step(); };
    std::promise<void> begun, ends;
    std::thread reader([&] {
      const auto reading = shards.reading();
      begun.set_value();
      ends.get_future().wait();
    });
    begun.get_future().wait();
    EXPECT_EQ(in_child(step), 0);
    ends.set_value();
    reader.join();
    const auto reading = shards.reading();
    EXPECT_EQ(in_child([&] { EXPECT_TRUE(has(message_of(step), "by the thread that reads them")); }), 0);
  });
}

/// What a saver's thread still holds in the parent, the child drops.
TEST(LocalShards, AForkedProcessDropsWhatASaverWrites) {
  fsdp::testing::TemporaryFolder folder;
  run_ranks(1, [&](int) {
    Training training;
    training.train(0, 1);
    auto saver = std::make_unique<fsdp::AsyncSaver>(*training.model, training.optimizer.get());
    std::promise<void> goes_on;
    const auto wait = goes_on.get_future().share();
    const auto report = [&](const fsdp::PhaseReport& phase) {
      if (phase.phase != fsdp::Phase::kCollect) wait.wait();
    };
    saver->save((folder.path() / "1").string(), {}, {.on_phase = report});
    EXPECT_EQ(in_child([&] {
                saver->wait();
                saver.reset();
                fsdp::save((folder.path() / "2").string(), *training.model);
              }),
              0);
    goes_on.set_value();
    saver->wait();
    for (const char* of : {"1", "2"}) fsdp::load((folder.path() / of).string(), *training.model);
  });
}

TEST(LocalShards, WritersWaitForReaders) {
  fsdp::testing::TemporaryFolder folder;
  run_ranks(2, [&](int rank) {
    Training training;
    training.train(0, 1);
    const auto path = (folder.path() / "1").string();
    fsdp::save(path, *training.model, *training.optimizer);
    fsdp::testing::stack_loss(training.model, 1, rank).backward();
    expect_waits(training, "step", [&] { training.optimizer->step(); });
    expect_waits(training, "load", [&] { fsdp::load(path, *training.model, *training.optimizer); });
    expect_waits(training, "SummonFullParams", [&] { const fsdp::SummonFullParams whole(*training.model); });
    expect_waits(training, "another reading", [&] { const auto reading = fsdp::local_shards(*training.model).reading(); });
    training.train(1, 2);
  });
}

}  // namespace local_shards_test
