#include "engine/main_parameters.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "fsdp/fsdp.h"
#include "support/meshes.h"
#include "support/messages.h"
#include "support/multi_rank.h"
#include "support/stack.h"

namespace main_parameters_test {

using fsdp::testing::has;
using fsdp::testing::line;
using fsdp::testing::message_of;
using fsdp::testing::run_ranks;
using fsdp::testing::Stack;
using fsdp::testing::stack_loss;

struct Sharded {
  Sharded() : model(fsdp::testing::make_stack()) {
    handle.emplace(fsdp::fully_shard(*model, {.mesh = line(), .units = fsdp::testing::stack_units()}));
  }
  fsdp::engine::Engine& engine() const { return *handle->engine(); }
  fsdp::engine::MainParameters& main() const { return engine().main(); }

  Stack model;
  std::optional<fsdp::FSDPModule> handle;
};

std::string refusal(const std::function<void()>& call) { return message_of<fsdp::Error>(call); }

TEST(MainParameters, LetsTornParametersBeLoadedOnly) {
  run_ranks(2, [](int rank) {
    Sharded sharded;
    sharded.main().expose();
    EXPECT_FALSE(sharded.main().may_be_lost());
    sharded.main().set_torn({"entry.weight"});
    sharded.main().set_torn({"head.bias"});
    EXPECT_EQ(sharded.main().torn(), (std::set<std::string>{"entry.weight", "head.bias"}));
    EXPECT_TRUE(sharded.main().may_be_lost());
    const std::string torn = "failed halfway";
    EXPECT_TRUE(has(refusal([&] { sharded.main().flush_writes(); }), torn));
    EXPECT_TRUE(has(refusal([&] { sharded.main().summon(*sharded.engine().units()[0]); }), torn));
    EXPECT_TRUE(has(refusal([&] { stack_loss(sharded.model, 0, rank); }), torn));
    sharded.main().prepare_load();
    sharded.main().set_torn({});
    EXPECT_TRUE(sharded.main().torn().empty());
    sharded.main().flush_writes();
    stack_loss(sharded.model, 0, rank);
  });
}

TEST(MainParameters, KnowsWhetherUsersMayHaveWritten) {
  run_ranks(2, [] {
    Sharded sharded;
    EXPECT_FALSE(sharded.main().is_exposed());
    EXPECT_TRUE(sharded.main().may_be_lost());
    sharded.handle->parameter_shards();
    EXPECT_TRUE(sharded.main().is_exposed());
    EXPECT_FALSE(sharded.main().may_be_lost());
  });
}

TEST(MainParameters, RefusesWhatBelongsToARetiredModel) {
  run_ranks(2, [] {
    Sharded sharded;
    sharded.main().retire();
    const std::string retired = "fully_unshard made ordinary again";
    EXPECT_TRUE(has(refusal([&] { sharded.main().check_parameters(); }), retired));
    EXPECT_TRUE(has(refusal([&] { sharded.main().flush_writes(); }), retired));
    EXPECT_TRUE(has(refusal([&] { sharded.main().prepare_load(); }), retired));
    EXPECT_TRUE(has(refusal([&] { sharded.main().set_torn({}); }), retired));
  });
}

TEST(MainParameters, GivesGradientsAwayOnce) {
  run_ranks(2, [](int rank) {
    Sharded sharded;
    auto& unit = *sharded.engine().units()[1];
    EXPECT_TRUE(sharded.main().take_gradients(unit).empty());
    stack_loss(sharded.model, 0, rank).backward();
    std::vector<at::Tensor> expected;
    for (const auto& part : unit.main_gradient.parts) expected.push_back(part.clone());
    const auto taken = sharded.main().take_gradients(unit);
    EXPECT_TRUE(sharded.main().take_gradients(unit).empty());
    EXPECT_FALSE(unit.main_gradient.valid);
    sharded.main().zero_grad();
    stack_loss(sharded.model, 1, rank).backward();  // It takes memory of its own.
    ASSERT_EQ(taken.size(), expected.size());
    for (std::size_t k = 0; k < taken.size(); ++k) EXPECT_TRUE(at::equal(taken[k], expected[k])) << k;
  });
}

// Writes to a shard reach all ranks at the next forward, and those to a present whole parameter reach the shards.
TEST(MainParameters, ChangesAreGathered) {
  run_ranks(2, [](int rank) {
    Sharded sharded;
    auto& unit = *sharded.engine().units()[1];
    sharded.engine().unshard(unit, /*wait=*/true);
    for (const auto& part : unit.main.parts) part.fill_(rank);
    sharded.main().shards_changed();
    EXPECT_EQ(unit.state(), fsdp::engine::ParameterState::kSharded) << "what is present is outdated";
    for (const auto& whole : sharded.main().gather_main(unit, unit.main.parts)) {
      const auto half = whole.numel() / 2;
      EXPECT_TRUE(at::equal(whole, at::cat({at::zeros({half}), at::ones({half})})));
    }
    const auto whole = sharded.main().summon(unit);
    for (const auto& part : whole) part.fill_(7);
    sharded.main().dismiss(unit, whole);
    for (const auto& part : unit.main.parts) EXPECT_TRUE(part.eq(7).all().item<bool>());
  });
}

}  // namespace main_parameters_test
