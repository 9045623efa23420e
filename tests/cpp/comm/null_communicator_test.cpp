#include "comm/null_communicator.h"

#include "support/collective_checks.h"

namespace fsdp::comm {
namespace null_communicator_test {

using testing::kGather;
using testing::kReduce;
using testing::kScatter;

TEST(NullCommunicator, MovesNothingAndCountsEverything) {
  NullCommunicator communicator(100, 1024);
  const GatherPart gather{.full = torch::full({1024 * 8}, 3.f), .shard = torch::ones({8})};
  communicator.all_gather({&gather, 1}, kGather)->wait();
  EXPECT_TRUE(at::equal(gather.full, torch::full({1024 * 8}, 3.f)));
  EXPECT_EQ(communicator.stats().all_gather_bytes, 1023 * 8 * 4);

  const ReducePart reduce{.unreduced = torch::ones({1024 * 8}, at::kHalf),
                          .staging = torch::ones({communicator.staging_numel(8)}, at::kHalf),
                          .out = torch::full({8}, 5.f)};
  communicator.reduce_scatter({&reduce, 1}, 0.5, kReduce)->wait();
  EXPECT_TRUE(at::equal(reduce.out, torch::full({8}, 5.f)));
  EXPECT_EQ(communicator.stats().reduce_scatter_bytes, 1023 * 8 * 2);
  EXPECT_EQ(communicator.stats().all_gathers, 1);
  EXPECT_EQ(communicator.stats().reduce_scatters, 1);

  const ScatterPart scatter{.shards = {}, .into = torch::full({8}, 7.f)};
  communicator.scatter({&scatter, 1}, 0, kScatter)->wait();
  EXPECT_TRUE(at::equal(scatter.into, torch::full({8}, 7.f)));
  EXPECT_EQ(communicator.stats().scatter_bytes, 0);  // Not the root.
  EXPECT_EQ(communicator.stats().scatters, 1);
}

TEST(NullCommunicator, TakesPeersToAgree) {
  NullCommunicator communicator(0, 3);
  const at::Tensor all = communicator.exchange(torch::tensor({1, 2}), {.operation = "flags", .unit = {}});
  EXPECT_TRUE(at::equal(all, torch::tensor({{1, 2}, {1, 2}, {1, 2}})));
  EXPECT_EQ(communicator.broadcast("text", 2, {.operation = "text", .unit = {}}), "text");
  EXPECT_EQ(communicator.gather("ab", {.operation = "texts", .unit = {}}), "ababab");
  EXPECT_EQ(NullCommunicator(1, 3).gather("ab", {.operation = "texts", .unit = {}}), "");
  communicator.expect_equal("model", {.operation = "description", .unit = {}});
  communicator.barrier();
}

}  // namespace null_communicator_test
}  // namespace fsdp::comm
