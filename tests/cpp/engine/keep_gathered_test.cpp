// keep_gathered_bytes: so many bytes of whole parameters stay from forward into backward, and save their second all-gather.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "engine/engine.h"
#include "fsdp/error.h"
#include "support/multi_rank.h"
#include "support/stack.h"

namespace keep_gathered_test {

using fsdp::testing::line;
using fsdp::testing::make_stack;
using fsdp::testing::run_ranks;
using fsdp::testing::stack_loss;
using fsdp::testing::stack_units;

constexpr int kRanks = 2;

struct Outcome {
  std::vector<std::pair<std::string, at::Tensor>> parameters;
  fsdp::WireStats wire;  // of the second step
  fsdp::MemoryStats memory;
  std::vector<std::int64_t> units;  // whole parameters, bytes
};

Outcome train(int rank, std::int64_t budget) {
  auto model = make_stack();
  auto sharded = fsdp::fully_shard(*model, {.mesh = line(), .units = stack_units(), .keep_gathered_bytes = budget});
  fsdp::AdamW optimizer(*model, {.lr = 1e-2});
  for (int step = 0; step < 2; ++step) {
    sharded.reset_wire_stats();
    stack_loss(model, step, rank).backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  Outcome outcome{.parameters = {}, .wire = sharded.wire_stats(), .memory = sharded.memory_stats(), .units = {}};
  for (const auto& unit : sharded.engine()->units()) outcome.units.push_back(unit->whole.buffer.bytes);
  outcome.parameters = sharded.full_parameters();
  return outcome;
}

TEST(KeepGathered, EachKeptUnitSavesAnAllGather) {
  run_ranks(kRanks, [](int rank) {
    const auto none = train(rank, 0);
    // The root stays anyway, and the last block from forward to backward: the others are units 1 to 3, in the order of their use.
    ASSERT_EQ(none.units.size(), 5U);
    const auto bytes = [&](std::size_t unit) { return none.units[unit]; };
    struct Case {
      std::int64_t budget;
      std::vector<std::size_t> kept;
    };
    const std::vector<Case> cases = {{bytes(1) - 1, bytes(2) < bytes(1) ? std::vector<std::size_t>{2} : std::vector<std::size_t>{}},
                                     {bytes(1), {1}},
                                     {bytes(1) + bytes(2), {1, 2}},
                                     {bytes(1) + bytes(2) + bytes(3), {1, 2, 3}}};
    for (const auto& [budget, kept] : cases) {
      SCOPED_TRACE(budget);
      const auto some = train(rank, budget);
      std::int64_t saved = 0;
      std::int64_t held = 0;
      for (const auto unit : kept) {
        saved += bytes(unit) / kRanks * (kRanks - 1);
        held += bytes(unit);
      }
      EXPECT_EQ(none.wire.all_gather_bytes - some.wire.all_gather_bytes, saved);
      EXPECT_EQ(none.wire.all_gathers - some.wire.all_gathers, static_cast<std::int64_t>(kept.size()));
      EXPECT_LE(some.memory.gathered_parameters.peak, none.memory.gathered_parameters.peak + held);
      EXPECT_EQ(some.memory.gathered_parameters.live, 0);
      for (std::size_t i = 0; i < none.parameters.size(); ++i) {
        EXPECT_TRUE(torch::equal(none.parameters[i].second, some.parameters[i].second)) << none.parameters[i].first;
      }
    }
  });
}

TEST(KeepGathered, ValidationPassesAndUpdatesLeaveNothingBehind) {
  run_ranks(kRanks, [](int rank) {
    auto model = make_stack();
    auto sharded = fsdp::fully_shard(*model, {.mesh = line(), .units = stack_units(), .keep_gathered_bytes = std::int64_t{1} << 30});
    fsdp::AdamW optimizer(*model, {.lr = 1e-2});
    const auto validate = [&] {
      const torch::NoGradGuard no_grad;
      return stack_loss(model, 7, rank).item<float>();
    };
    const auto first = validate();
    sharded.reset_wire_stats();
    EXPECT_EQ(validate(), first);
    EXPECT_EQ(sharded.wire_stats().all_gathers, 0);  // Everything is still there.
    stack_loss(model, 0, rank).backward();
    optimizer.step();
    EXPECT_EQ(sharded.memory_stats().gathered_parameters.live, 0);
    EXPECT_NE(validate(), first);  // Nothing stale.
    sharded.reset();
    EXPECT_EQ(sharded.memory_stats().gathered_parameters.live, 0);
    EXPECT_THROW(train(rank, -1), fsdp::Error);
  });
}

}  // namespace keep_gathered_test
