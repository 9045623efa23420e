#include "support/unkind_communicator.h"

#include <gtest/gtest-spi.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "support/collective_checks.h"
#include "support/meshes.h"
#include "support/messages.h"
#include "support/multi_rank.h"

namespace fsdp::comm {
namespace unkind_communicator_test {

using testing::Gather;
using testing::kGather;
using testing::kReduce;
using testing::kScatter;
using testing::PieceShape;
using testing::Reduce;
using testing::run_ranks;
using testing::Scatter;
using testing::unkind;
using testing::UnkindOptions;

const std::vector<PieceShape> kMixed = {{.numel = 33, .dtype = at::kFloat},
                                        {.numel = 0, .dtype = at::kFloat},
                                        {.numel = 7, .dtype = at::kBFloat16, .out_dtype = at::kFloat, .accumulate = true},
                                        {.numel = 1, .dtype = at::kHalf, .out_dtype = at::kHalf}};

std::shared_ptr<Communicator> world() { return unkind(testing::line(), {.seed = 1}).communicator("dp_shard"); }

TEST(UnkindCommunicator, DeliversToThoseWhoKeepTheContract) {
  for (const int size : {1, 3}) {
    run_ranks(size, [](int rank) {
      const auto communicator = world();
      for (const bool alias : {false, true}) {
        Gather gather(*communicator, kMixed, 1, alias);
        Reduce reduce(*communicator, kMixed, 2, 0.5);
        Scatter scatter(*communicator, kMixed, 3, 0, alias);
        auto gathered = communicator->all_gather(gather.parts, kGather);
        auto reduced = communicator->reduce_scatter(reduce.parts, 0.5, kReduce);
        auto scattered = communicator->scatter(scatter.parts, 0, kScatter);
        if (rank == 0) scattered->wait();
        reduced->wait();
        gathered->wait();
        gathered->wait();  // Idempotent.
        scattered->wait();
        gather.check();
        reduce.check();
        scatter.check();
      }
      Reduce in_place(*communicator, {{.numel = 10, .dtype = at::kFloat}}, 4, 0.25);
      in_place.parts[0].out = in_place.parts[0].unreduced.narrow(0, communicator->rank() * 10, 10);
      communicator->reduce_scatter(in_place.parts, 0.25, kReduce)->wait();
      in_place.check();
      communicator->expect_equal("text", {.operation = "text", .unit = {}});
      EXPECT_EQ(communicator->exchange(torch::ones({2}), {.operation = "ones", .unit = {}}).numel(), 2 * communicator->size());
      communicator->barrier();
    });
  }
}

TEST(UnkindCommunicator, ShowsNothingBeforeWait) {
  run_ranks(2, [](int rank) {
    const auto communicator = world();
    Gather gather(*communicator, {{.numel = 5, .dtype = at::kFloat}}, 1, /*alias=*/true);
    Reduce reduce(*communicator, {{.numel = 5, .dtype = at::kBFloat16, .out_dtype = at::kDouble, .accumulate = true}}, 1, 1);
    const auto gathered = communicator->all_gather(gather.parts, kGather);
    const auto reduced = communicator->reduce_scatter(reduce.parts, 1, kReduce);
    communicator->barrier();  // By now everything has arrived.
    const at::Tensor& full = gather.parts[0].full;
    EXPECT_TRUE(full.narrow(0, (1 - rank) * 5, 5).isnan().all().item<bool>());
    EXPECT_FALSE(full.narrow(0, rank * 5, 5).isnan().any().item<bool>()) << "the shard itself was poisoned";
    EXPECT_TRUE(reduce.parts[0].out.isnan().all().item<bool>());
    EXPECT_TRUE(reduce.parts[0].staging.isnan().all().item<bool>());
    gathered->wait();
    reduced->wait();
    gather.check();
    reduce.check();
  });
}

TEST(UnkindCommunicator, WhatIsNotWaitedForIsNotDelivered) {
  run_ranks(2, [](int rank) {
    const auto communicator = world();
    Gather gather(*communicator, {{.numel = 5, .dtype = at::kFloat}}, 1, false);
    communicator->all_gather(gather.parts, kGather).reset();
    EXPECT_TRUE(gather.parts[0].full.isnan().all().item<bool>());
    gather.parts[0].shard.fill_(1);  // The collective is over: nobody minds.
    communicator->barrier();
  });
}

TEST(UnkindCommunicator, CountsWhatTheInnerOneCounts) {
  run_ranks(2, [] {
    const auto mesh = unkind(testing::line(), {});
    const auto communicator = mesh.new_communicator("dp_shard");
    communicator->reset_stats();
    Gather gather(*communicator, {{.numel = 5, .dtype = at::kFloat}}, 1, false);
    communicator->all_gather(gather.parts, kGather)->wait();
    EXPECT_EQ(communicator->stats().all_gather_bytes, 20);
    EXPECT_EQ(communicator->stats().all_gathers, 1);
    communicator->reset_stats();
    EXPECT_EQ(communicator->stats().all_gathers, 0);
  });
}

/// What is reported where `between` runs between start and wait (or, if `drop`, destruction) of all three collectives, on one rank.
struct Buffers {
  Gather gather;
  Reduce reduce;
  Scatter scatter;
};

std::vector<std::string> misuse(const std::function<void(Buffers&)>& between, bool drop = false, bool alias = false) {
  std::vector<std::string> reports;
  const auto mesh =
      unkind(null_device_mesh({{"dp_shard", 2}}, 0), {.seed = 2, .report = [&](const auto& text) { reports.push_back(text); }});
  const auto communicator = mesh.communicator("dp_shard");
  const std::vector<PieceShape> shapes = {{.numel = 5, .dtype = at::kFloat}, {.numel = 4, .dtype = at::kHalf}};
  Buffers buffers{Gather(*communicator, shapes, 1, alias), Reduce(*communicator, shapes, 1, 1),
                  Scatter(*communicator, shapes, 1, 0, alias)};
  std::vector<std::unique_ptr<Pending>> pending;
  pending.push_back(communicator->all_gather(buffers.gather.parts, kGather));
  pending.push_back(communicator->reduce_scatter(buffers.reduce.parts, 1, kReduce));
  pending.push_back(communicator->scatter(buffers.scatter.parts, 0, kScatter));
  between(buffers);
  if (drop) pending.clear();
  for (const auto& each : pending) each->wait();
  return reports;
}

TEST(UnkindCommunicator, NoticesEachKindOfMisuse) {
  using Reports = std::vector<std::string>;
  for (const bool drop : {false, true}) {
    EXPECT_EQ(misuse([](Buffers&) {}, drop), Reports{});
    EXPECT_EQ(misuse([](Buffers&) {}, drop, /*alias=*/true), Reports{});
    const auto expect = [&](const char* report, const std::function<void(Buffers&)>& between) {
      EXPECT_EQ(misuse(between, drop), Reports{report});
    };
    expect("all-gather of unit 'layers.0': shard was changed before wait()", [](Buffers& b) { b.gather.parts[1].shard[3] = 7; });
    expect("all-gather of unit 'layers.0': full was written to before wait()", [](Buffers& b) { b.gather.parts[0].full[0] = 7; });
    expect("all-gather of unit 'layers.0': full was written to before wait()", [](Buffers& b) { b.gather.parts[1].full[7] = 7; });
    expect("reduce-scatter of unit 'layers.0': unreduced was changed before wait()",
           [](Buffers& b) { b.reduce.parts[0].unreduced.zero_(); });
    expect("reduce-scatter of unit 'layers.0': staging was written to before wait()", [](Buffers& b) { b.reduce.parts[0].staging[4] = 7; });
    expect("reduce-scatter of unit 'layers.0': out was written to before wait()", [](Buffers& b) {
      b.reduce.parts[1].out.add_(1);
      b.reduce.parts[1].out.zero_();
    });
    expect("reduce-scatter of unit 'layers.0': the memory of unreduced was freed before wait()",
           [](Buffers& b) { b.reduce.parts[0].unreduced.storage().unsafeGetStorageImpl()->set_nbytes(0); });
    expect("scatter of unit 'layers.0': shard was changed before wait()", [](Buffers& b) { b.scatter.parts[0].shards[1].zero_(); });
    expect("scatter of unit 'layers.0': into was written to before wait()", [](Buffers& b) { b.scatter.parts[0].into.zero_(); });
  }
  EXPECT_EQ(misuse([](Buffers& b) { b.gather.parts[0].full[2] = 7; }, false, /*alias=*/true),
            Reports{"all-gather of unit 'layers.0': shard was changed before wait()"});
}

TEST(UnkindCommunicator, NoticesALabelThatDies) {
  std::vector<std::string> reports;
  const auto mesh = unkind(null_device_mesh({{"dp_shard", 2}}, 0), {.report = [&](const auto& text) { reports.push_back(text); }});
  std::string unit = "layers.0";
  Gather gather(*mesh.communicator("dp_shard"), {{.numel = 5, .dtype = at::kFloat}}, 1, false);
  auto pending = mesh.communicator("dp_shard")->all_gather(gather.parts, {.operation = "all-gather", .unit = unit});
  unit[0] = 'L';
  pending->wait();
  EXPECT_EQ(reports, std::vector<std::string>{"all-gather of unit 'layers.0': the label's unit has died"});
}

TEST(UnkindCommunicator, FailsTheTestWhereNobodyElseIsTold) {
  run_ranks(1, [] {
    const auto communicator = world();
    EXPECT_NONFATAL_FAILURE(
        {
          Gather gather(*communicator, {{.numel = 5, .dtype = at::kFloat}}, 1, false);
          const auto pending = communicator->all_gather(gather.parts, kGather);
          gather.parts[0].shard.zero_();
          pending->wait();
        },
        "shard was changed before wait()");
  });
}

}  // namespace unkind_communicator_test
}  // namespace fsdp::comm
